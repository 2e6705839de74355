#!/usr/bin/env python3
"""Writes the golden pages of WAL page format version 1. Not part of the build.

usage: wal.py        reads plain-v1.wal, writes sealed-v1-*.wal

An independent implementation of cipher/src/wal.rs, from the format's description alone, on the
Python package `cryptography` (OpenSSL). The golden pages fix the format: a change that alters them
needs a new format version, with its own golden pages.

plain-v1.wal is the fourth page of the first segment that `initdb` of PostgreSQL 17 wrote.
"""

from pathlib import Path

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

HERE = Path(__file__).parent
VERSION = 4095 + 1234


def seal(page, key):
    page = bytearray(page)
    info = int.from_bytes(page[2:4], "little")
    assert info < 16
    mark = (VERSION - 1) % 4095 + 1
    page[2:4] = (info | mark << 4).to_bytes(2, "little")
    tweak = page[8:16] + page[4:8] + b"WAL1"
    encryptor = Cipher(algorithms.AES(key), modes.XTS(bytes(tweak))).encryptor()
    page[16:] = encryptor.update(bytes(page[16:]))
    return bytes(page)


plain = (HERE / "plain-v1.wal").read_bytes()
for bits in (256, 128):
    (HERE / f"sealed-v1-aes-{bits}-xts.wal").write_bytes(seal(plain, bytes(range(bits // 4))))
