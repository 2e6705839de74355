#!/usr/bin/env python3
"""Writes the golden file of stream format version 1. Not part of the build.

usage: stream.py        writes sealed-v1.stream

An implementation of cipher/src/stream.rs of its own, from the format's description alone, on the
Python package `cryptography` (OpenSSL). The plaintext is the offset of each 32-bit word, little-endian,
cut to 8237 bytes: two whole units, two blocks more, a tail of 13 bytes; the key is the bytes 0, 1, 2, ...
"""

from pathlib import Path

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

LENGTH, UNIT = 8237, 4096
KEY = bytes(range(64))


def xts(low, high, data):
    tweak = low.to_bytes(8, "little") + high.to_bytes(8, "little")
    return Cipher(algorithms.AES(KEY), modes.XTS(tweak)).encryptor().update(data)


plain = b"".join(offset.to_bytes(4, "little") for offset in range(0, LENGTH, 4))[:LENGTH]
blocks = LENGTH // 16
sealed = b"".join(xts(at // UNIT, 0, plain[at:min(at + UNIT, blocks * 16)]) for at in range(0, blocks * 16, UNIT))
tail = plain[blocks * 16:]
mask = xts(blocks, len(tail), bytes(16))
sealed += bytes(a ^ b for a, b in zip(tail, mask))
assert len(sealed) == LENGTH
Path(__file__).with_name("sealed-v1.stream").write_bytes(sealed)
