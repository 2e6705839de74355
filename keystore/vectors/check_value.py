#!/usr/bin/env python3
"""The key check value of a database key, from its description in src/check_value.rs alone."""

import hashlib
import hmac
import struct


def mac(key, *parts):
    return hmac.new(key, b"".join(parts), hashlib.sha256).digest()


def check_value(key, keystore, scope, version):
    label = b"pagevault database key check value v1"
    context = keystore + struct.pack("<II", scope, version)
    info = b"".join(struct.pack("<Q", len(part)) + part for part in (label, context))
    return mac(mac(bytes(32), key), info, b"\x01")[:16]


if __name__ == "__main__":
    print(check_value(bytes([7] * 32), b"0123456789abcdef", 5, 3).hex())
