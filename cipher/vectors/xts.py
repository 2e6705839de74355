#!/usr/bin/env python3
"""Writes the XTS vector files of this folder. Not part of the build.

usage: xts.py            writes ieee-1619.rsp
       xts.py FILE.rsp   writes the vectors of a NIST CAVP file that consist of whole blocks to
                         standard output

Needs the Python package `cryptography` (OpenSSL). The inputs of ieee-1619.rsp are those of IEEE
1619-2018, annex B, vectors 1 to 14 (15 to 18, for ciphertext stealing, are in src/stream.rs).
OpenSSL refuses vector 1, whose two keys are equal; its output is copied from the standard.
"""

import sys
from pathlib import Path

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes


def xts(key, tweak, plain):
    encryptor = Cipher(algorithms.AES(key), modes.XTS(tweak)).encryptor()
    return encryptor.update(plain) + encryptor.finalize()


def ieee_1619():
    count = bytes(range(256)) * 2
    key1 = bytes.fromhex("fffefdfcfbfaf9f8f7f6f5f4f3f2f1f0")
    e = bytes.fromhex("2718281828459045235360287471352662497757247093699959574966967627")
    pi = bytes.fromhex("3141592653589793238462643383279502884197169399375105820974944592")
    short, long = e[:16] + pi[:16], e + pi
    vectors = [
        (b"\x11" * 16 + b"\x22" * 16, 0x3333333333, b"\x44" * 32),
        (key1 + b"\x22" * 16, 0x3333333333, b"\x44" * 32),
    ]
    plain = count
    # Vectors 4 to 9 are the ends of a chain over 256 data units: the ciphertext of one is the
    # plaintext of the next.
    for unit in range(256):
        if unit <= 2 or unit >= 0xFD:
            vectors.append((short, unit, plain))
        plain = xts(short, unit.to_bytes(16, "little"), plain)
    vectors += [(long, unit, count) for unit in (0xFF, 0xFFFF, 0xFFFFFF, 0xFFFFFFFF, 0xFFFFFFFFFF)]

    yield "# IEEE 1619-2018, annex B, vectors 1 to 14, written by xts.py\n\n[ENCRYPT]\n"
    yield record(1, bytes(32), bytes(16), bytes(32), bytes.fromhex(
        "917cf69ebd68b2ec9b9fe9a3eadda692cd43d2f59598ed858c02c2652fbf922e"))
    for number, (key, unit, plain) in enumerate(vectors, 2):
        tweak = unit.to_bytes(16, "little")
        yield record(number, key, tweak, plain, xts(key, tweak, plain))


def record(number, key, tweak, plain, cipher):
    return (f"\nCOUNT = {number}\nDataUnitLen = {len(plain) * 8}\nKey = {key.hex()}\n"
            f"i = {tweak.hex()}\nPT = {plain.hex()}\nCT = {cipher.hex()}\n")


def whole_blocks(text):
    """Drops the records whose data unit is not a multiple of 128 bits."""
    yield "# Of the file whose header follows, the data units of whole blocks.\n"
    for record in text.replace("\r", "").split("\n\n"):
        lengths = [line for line in record.splitlines() if line.startswith("DataUnitLen = ")]
        if not lengths or int(lengths[0].split(" = ")[1]) % 128 == 0:
            yield record.strip("\n") + "\n\n" if record.strip("\n") else ""


if len(sys.argv) > 1:
    sys.stdout.write("".join(whole_blocks(Path(sys.argv[1]).read_text())).rstrip("\n") + "\n")
else:
    Path(__file__).with_name("ieee-1619.rsp").write_text("".join(ieee_1619()))
