#!/usr/bin/env python3
"""Writes the golden files of format version 1 from the format's description alone, without the Rust
code, so that the two check each other. Run it only to add files for a new format version: what is
committed for an old one never changes."""

import pathlib
import struct

HERE = pathlib.Path(__file__).parent / "v1"
KEYSTORE_ID = bytes(range(16))


def crc32c(data):
    """CRC-32C (RFC 3720, B.4), bit by bit."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


assert crc32c(b"123456789") == 0xE3069283


def blob(data):
    return struct.pack("<I", len(data)) + data


def text(string):
    return blob(string.encode())


def rel(tablespace, database, relation):
    return struct.pack("<III", tablespace, database, relation)


def record(kind, payload, version=1):
    return struct.pack("<BB", kind, version) + blob(payload)


def provider(name, kind, options, programs):
    return record(1, struct.pack("<B", programs) + text(name) + text(kind) + text(options))


def drop_provider(name):
    return record(2, text(name))


def database_key(scope, version, name, key, key_version, wrapped, check, created):
    fixed = struct.pack("<IIQq", scope, version, key_version, created) + check
    return record(3, fixed + text(name) + text(key) + blob(wrapped))


def database_key_3(scope, version, name, key, key_version, wrapped, check, times, others):
    record_2 = database_key_2(scope, version, name, key, key_version, wrapped, check, times)
    payload = record_2[6:] + struct.pack("<B", len(others))
    for name, key, key_version, wrapped, at, since in others:
        payload += struct.pack("<Qqq", key_version, at, since) + text(name) + text(key) + blob(wrapped)
    return record(3, payload, 3)


def database_key_2(scope, version, name, key, key_version, wrapped, check, times):
    made, wrapped_at, master_key = times
    fixed = struct.pack("<IIQq", scope, version, key_version, wrapped_at) + check
    named = text(name) + text(key) + blob(wrapped)
    return record(3, fixed + named + struct.pack("<qq", made, master_key), 2)


def data_key(file, version, cipher, scope, key_version, wrapped, created):
    fixed = struct.pack("<HBBIIq", version, cipher, 0, scope, key_version, created)
    return record(4, file + fixed + blob(wrapped))


def current(file, version):
    return record(5, file + struct.pack("<H", version))


def plaintext(file, after):
    return record(6, file + struct.pack("<H", after))


def rewriting(file, version, plaintext, done):
    return record(7, file + struct.pack("<HBB", version, plaintext, done))


def sealed_only(file, version, plaintext):
    return record(14, file + struct.pack("<HB", version, plaintext))


def destroyed(file, through, cipher, whole, lsn, at):
    return record(8, file + struct.pack("<HBBQq", through, cipher, whole, lsn, at))


def wal_switch(step, start, version, plaintext):
    return record(9, struct.pack("<IQIB", step, start, version, plaintext))


def job(database, number, relation, kind, cipher, requested_by, at, transaction):
    fixed = struct.pack("<IBBIqQ", relation, kind, cipher, requested_by, at, transaction)
    return record(10, struct.pack("<IQ", database, number) + fixed)


def job_step(database, number, step, state, started, at, error):
    fixed = struct.pack("<IQIBqq", database, number, step, state, started, at)
    return record(11, fixed + text(error))


def job_begun(database, number, relation):
    return record(12, struct.pack("<IQI", database, number, relation))


def jobs_forgotten(database, through, everything):
    return record(13, struct.pack("<IQB", database, through, everything))


def former_files(database, first, last, through, gone):
    return record(15, struct.pack("<IIIHQ", database, first, last, through, gone))


def keys_forgotten(database, by):
    return record(16, struct.pack("<IQ", database, by))


def key_group(group, name, at):
    return record(17, struct.pack("<Iq", group, at) + text(name))


def ended_key_group(group, at):
    return record(18, struct.pack("<Iq", group, at))


def frame(settled, logged, records):
    body = b"".join(records)
    head = b"\xdbpv\xb1" + struct.pack("<HHIIQQ", 1, 0, len(body), crc32c(body), settled, logged)
    return head + struct.pack("<I", crc32c(head)) + body


class Log:
    """A new log, which is wholly durable and ends in a mark that says so."""

    def __init__(self, scope, generation):
        self.logged = 0
        fixed = struct.pack("<HH", 1, 0) + KEYSTORE_ID + struct.pack("<II", scope, generation)
        self.content = b"pvkeys\r\n" + fixed
        self.content += struct.pack("<I", crc32c(self.content))
        self.settle()

    def stage(self, logged, *records):
        self.content += frame(self.settled, logged, records)
        self.logged = max(self.logged, logged)

    def append(self, *records):
        self.stage(0, *records)
        self.settled = len(self.content)

    def settle(self):
        self.settled = len(self.content)
        self.stage(self.logged)


WRAPPED_64 = bytes(range(92))
WRAPPED_32 = bytes(range(100, 160))
FILE = rel(1663, 5, 16384)
SHARED = rel(1664, 0, 1260)

cluster = Log(0, 0)
cluster.append(
    provider("disk", "file", '{"path": "/etc/pagevault/keys"}', 0),
    provider("Schlüssel", "vault", "{}", 1),
)
cluster.append(
    database_key(0, 1, "disk", "main", 1, b"\x01\x02\x03", b"\xc1" * 16, 1700000000),
    database_key(5, 2, "disk", "schlüssel", 2**40 + 7, bytes(range(60)), KEYSTORE_ID, -1),
)
cluster.append(drop_provider("Schlüssel"))
cluster.append(data_key(SHARED, 1, 2, 0, 1, WRAPPED_32, 1700000001), current(SHARED, 1))

database = Log(5, 3)
database.stage(
    0x1000,
    data_key(FILE, 1, 1, 5, 1, WRAPPED_64, 1700000002),
    current(FILE, 1),
)
database.stage(0x1_0000_1000, data_key(FILE, 8191, 2, 0, 4000000000, WRAPPED_32, 1700000003))
database.settle()
database.append(plaintext(FILE, 8191))
database.stage(0x1_0000_2000, rewriting(FILE, 8191, 1, 1))

# Version n of the WAL key is recorded as that of relation file 0/0/1 + (n - 1) / 8191, version 1 + (n - 1) % 8191.
wal = Log(0, 0)
wal.append(data_key(rel(0, 0, 1), 1, 1, 0, 1, WRAPPED_64, 1700000004))
wal.append(wal_switch(1, 0x1_6B374000, 1, 0))
wal.append(wal_switch(2, 0x2_00002000, 1, 1))
wal.append(data_key(rel(0, 0, 2), 1, 2, 0, 1, WRAPPED_32, 1700000005))
wal.append(wal_switch(4000000000, 0xFFFF_FFFF_0000_0000, 8192, 0))

shredded = Log(6, 1)
OTHER = rel(1663, 6, 16384)
shredded.append(
    destroyed(OTHER, 3, 1, 0, 0x16B374D8F, 1800000000),
    current(OTHER, 3),
    destroyed(rel(1663, 6, 16385), 8191, 0, 1, 0x2A0000028, 1800000001),
)

rewritten = Log(7, 0)
THIRD = rel(1663, 7, 16384)
rewritten.append(
    data_key(THIRD, 1, 1, 7, 1, WRAPPED_64, 1700000006), current(THIRD, 1), rewriting(THIRD, 1, 0, 0)
)
rewritten.append(rewriting(THIRD, 1, 0, 1))
rewritten.append(plaintext(THIRD, 1), rewriting(THIRD, 1, 1, 0))

jobs = Log(8, 0)
jobs.append(job(8, 1, 16384, 1, 2, 10, 1800000000000000, 2**32 + 7))
jobs.append(job_step(8, 1, 1, 1, 0, 1800000000000001, ""), job_begun(8, 1, 16385))
jobs.append(job(8, 2**63 - 1, 16386, 3, 0, 4294967295, -1, 9))
jobs.append(job_step(8, 1, 2, 5, 1800000000000002, 1800000000000003, "Schlüssel fehlt"))
jobs.append(jobs_forgotten(8, 1, 0))

born = Log(9, 0)
FOURTH = rel(1663, 9, 16384)
born.append(
    data_key(FOURTH, 1, 1, 9, 1, WRAPPED_64, 1700000007), current(FOURTH, 1), sealed_only(FOURTH, 1, 0)
)
born.append(sealed_only(FOURTH, 1, 1))
born.append(sealed_only(FOURTH, 8191, 0))

former = Log(10, 0)
former.append(former_files(10, 16384, 4294967295, 8191, 0x2A0000028))
former.append(keys_forgotten(10, 0x2A0000028), former_files(10, 1, 1, 1, 1))

several = Log(0, 0)
several.append(
    database_key_3(
        0, 7, "disk", "main", 3, bytes([1, 2, 3]), bytes([0xC3] * 16), (1_700_000_004, 1_700_000_005, 1_700_000_005),
        [
            ("Tresor", "schlüssel", 1 << 40, bytes(range(60)), 1_700_000_006, 1_700_000_001),
            ("kms", "alias/x", 0, bytes([9]), -1, -1),
        ],
    )
)
(HERE / "several.keys").write_bytes(several.content)

rotated = Log(0, 0)
rotated.append(
    database_key(0, 1, "disk", "main", 1, b"\x01\x02\x03", b"\xc1" * 16, 1700000000),
    database_key_2(0, 1, "disk", "main", 2, b"\x04", b"\xc1" * 16, (1700000000, 1700000008, 1700000008)),
    database_key_2(0, 2, "disk", "main", 2, b"\x05", b"\xc2" * 16, (1700000009, 1700000009, 1700000008)),
)

groups = Log(0, 0)
groups.append(key_group(100, "acme", 1700000010))
groups.append(database_key(100, 1, "disk", "acme", 1, b"\x06\x07", b"\xc4" * 16, 1700000011))
groups.append(key_group(11999, "0_x-9", -1))
groups.append(ended_key_group(11999, 1700000012))
(HERE / "groups.keys").write_bytes(groups.content)

switched = Log(11, 0)
FOURTH = rel(1663, 11, 16384)
switched.append(
    data_key(FOURTH, 1, 1, 11, 1, WRAPPED_64, 1700000013), rewriting(FOURTH, 1, 0, 0), current(FOURTH, 1)
)
switched.append(record(19, FOURTH + struct.pack("<HBQ", 1, 0, 0x2A0000028)))
(HERE / "11.keys").write_bytes(switched.content)

given_up = b"pvgiven1" + KEYSTORE_ID
given_up += frame(0, 0, [ended_key_group(100, 1700000013), ended_key_group(11999, -1)])
(HERE / "given_up").write_bytes(given_up)

(HERE / "rotated.keys").write_bytes(rotated.content)
(HERE / "10.keys").write_bytes(former.content)
(HERE / "9.keys").write_bytes(born.content)
(HERE / "8.keys").write_bytes(jobs.content)
(HERE / "7.keys").write_bytes(rewritten.content)
(HERE / "wal.keys").write_bytes(wal.content)
(HERE / "6.keys").write_bytes(shredded.content)
(HERE / "cluster.keys").write_bytes(cluster.content)
(HERE / "5.keys").write_bytes(database.content)
