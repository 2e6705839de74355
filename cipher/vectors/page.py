#!/usr/bin/env python3
"""Writes the golden pages of page format version 1. Not part of the build.

usage: page.py        reads plain-v1.page, writes sealed-v1-*.page

An independent implementation of cipher/src/page/v1.rs, from the format's description alone, on the
Python package `cryptography` (OpenSSL). The golden pages fix the format: a change that alters them
needs a new format version, with its own golden pages.

plain-v1.page is block 3 of pg_class (base/5/1259) as `initdb --data-checksums` of PostgreSQL 15
left it on disk.
"""

from pathlib import Path

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

HERE = Path(__file__).parent
BLOCK, VERSION = 3, 4711
BASE_OFFSETS = """
    5B1F36E9 B8525960 02AB50AA 1DE66D2A 79FF467A 9BB9F8A3 217E7CD2 83E13D2C
    F8D4474F E39EB970 42C6AE16 993216FA 7B093B5D 98DAFF3C F718902A 0B1C9CDB
    E58F764B 187636BC 5D7B3BB1 E73DE7DE 92BEC979 CCA6C0B2 304A0979 85AA43D4
    783125BB 6CA8EAA2 E407EAC6 4B5CFC3E 9FBF8C76 15CA20BE F2CA9FD3 959BD756"""


def checksum(page, block):
    page = page[:8] + bytes(2) + page[10:]
    sums = [int(offset, 16) for offset in BASE_OFFSETS.split()]
    words = [int.from_bytes(page[i:i + 4], "little") for i in range(0, 8192, 4)] + [0] * 64
    for i, word in enumerate(words):
        mixed = sums[i % 32] ^ word
        sums[i % 32] = (mixed * 16777619 & 0xFFFFFFFF) ^ (mixed >> 17)
    result = block
    for value in sums:
        result ^= value
    return result % 65535 + 1


def seal(page, key, fork, checksums):
    page = bytearray(page)
    page[18:20] = page[8:10] if checksums else bytes(2)
    flags = int.from_bytes(page[10:12], "little") & 7 | VERSION << 3
    page[10:12] = flags.to_bytes(2, "little")
    tweak = page[:8] + BLOCK.to_bytes(4, "little") + bytes([fork, 0, 0, 0])
    encryptor = Cipher(algorithms.AES(key), modes.XTS(bytes(tweak))).encryptor()
    page[16:] = encryptor.update(bytes(page[16:]))
    page[8:10] = (checksum(bytes(page), BLOCK) if checksums else 0).to_bytes(2, "little")
    return bytes(page)


if __name__ == "__main__":
    plain = (HERE / "plain-v1.page").read_bytes()
    assert int.from_bytes(plain[8:10], "little") == checksum(plain, BLOCK), "not PostgreSQL's checksum"
    for bits in (256, 128):
        key = bytes(range(bits // 4))
        for suffix, fork, checksums in (("", 0, True), ("-no-checksums", 0, False), ("-fsm", 1, True), ("-vm", 2, True)):
            name = f"sealed-v1-aes-{bits}-xts{suffix}.page"
            (HERE / name).write_bytes(seal(plain, key, fork, checksums))
