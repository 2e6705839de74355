#!/usr/bin/env python3
"""Writes the golden pages of page format version 2. Not part of the build.

usage: page2.py        reads plain-v1.page, writes plain-v2-*.page and sealed-v2-*.page

An independent implementation of cipher/src/page/v2 from the format's description alone: AES, XTS,
HKDF and HMAC of the Python package `cryptography` (OpenSSL), POLYVAL by definition (RFC 8452
section 3), bit by bit, and verified with the RFC's example first. Like the pages of version 1 these
fix the format.

The plaintext pages: `heap` is block 3 of pg_class as `initdb --data-checksums` of PostgreSQL 15
left it on disk; the others are made here, one for each place that a tag can have.
"""

import hashlib
from pathlib import Path

from cryptography.hazmat.primitives import hashes, hmac
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from page import BLOCK, HERE, VERSION, checksum

KEY = bytes(range(64))
MAIN, FSM, VM = 0, 1, 2


def number(data):
    return int.from_bytes(data, "little")


def polyval(key, message):
    """x^128 + x^127 + x^126 + x^121 + 1; dot(a, b) = a b x^-128."""
    polynomial = 1 << 128 | 1 << 127 | 1 << 126 | 1 << 121 | 1
    key, total = number(key), 0
    for at in range(0, len(message), 16):
        total ^= number(message[at:at + 16])
        product = 0
        for bit in range(128):
            if total >> bit & 1:
                product ^= key << bit
        for _ in range(128):  # divide by x
            if product & 1:
                product ^= polynomial
            product >>= 1
        total = product
    return total.to_bytes(16, "little")


assert polyval(bytes.fromhex("25629347589242761d31f826ba4b757b"),
               bytes.fromhex("4f4f95668c83dfb6401762bb2d01a262d1a24ddd2721d006bbe45f20d3c9f362")
               ).hex() == "f7a3b47b846119fae5b7866cf5e5b77e"


def derive(label, length):
    info = len(label).to_bytes(8, "little") + label + bytes(8)
    return HKDF(hashes.SHA256(), length, None, info).derive(KEY)


def polyval_tag(context, page):
    keys = derive(b"pagevault page tag AES-256 POLYVAL v1", 48)
    encryptor = Cipher(algorithms.AES(keys[16:]), modes.ECB()).encryptor()
    return encryptor.update(polyval(keys[:16], context + page))


def hmac_tag(context, page):
    mac = hmac.HMAC(derive(b"pagevault page tag HMAC-SHA-256 v1", 32), hashes.SHA256())
    mac.update(context + bytes(48) + page)
    return mac.finalize()[:16]


def word(page, at):
    return number(page[at:at + 2])


def put(page, at, value, length=2):
    page[at:at + length] = value.to_bytes(length, "little")


ITEM_BITS = [0, 1, 2, 13, 14, 30, 31]
SPECIAL_BITS = [0, 1, 2, 14, 15]


def place_of(page, fork):
    """(form, argument, list of the tag's bits as bit numbers in the page), and packs a map."""
    lower, upper = word(page, 12), word(page, 14)

    def zeros(start):
        return 0, start // 2, [start * 8 + bit for bit in range(128)]

    start = (lower + 1) // 2 * 2
    if start + 16 <= upper and not any(page[start:start + 16]):
        return zeros(start)
    if fork == VM:
        values = [page[24 + i // 4] >> i % 4 * 2 & 3 for i in range(320)]
        if 2 not in values:
            for i in range(64):
                digits = [min(value, 2) for value in values[i * 5:i * 5 + 5]]
                page[24 + i] = sum(digit * 3 ** k for k, digit in enumerate(digits))
            page[88:104] = bytes(16)
            return 2, 0, [88 * 8 + bit for bit in range(128)]
    for start in range(24, 8192 - 19 * 4 + 1, 4):
        items = range(start, start + 19 * 4, 4)
        bits = [item * 8 + bit for item in items for bit in ITEM_BITS]
        if not any(page[bit // 8] >> bit % 8 & 1 for bit in bits):
            return 1, start // 4, bits[:128]
    for start in range(24, 8192 - 15, 2):
        if not any(page[start:start + 16]):
            return zeros(start)
    return 8, 0, [16 * 8 + bit for bit in SPECIAL_BITS] + [18 * 8 + bit for bit in range(15)]


def seal(page, fork, checksums, tag_of):
    page = bytearray(page)
    form, argument, bits = place_of(page, fork)
    put(page, 18, form << 12 | argument)
    put(page, 10, word(page, 10) & 7 | VERSION << 3)
    put(page, 8, 0)
    context = BLOCK.to_bytes(4, "little") + bytes([0, 0, 0, 0, fork, 2]) + bytes(6)
    tag = number(tag_of(context, bytes(page)))
    for i, bit in enumerate(bits):
        page[bit // 8] |= (tag >> i & 1) << bit % 8
    tweak = page[:8] + BLOCK.to_bytes(4, "little") + bytes([fork, 0, 0, 0])
    encryptor = Cipher(algorithms.AES(KEY), modes.XTS(bytes(tweak))).encryptor()
    page[16:] = encryptor.update(bytes(page[16:]))
    put(page, 8, checksum(bytes(page), BLOCK) if checksums else 0)
    return bytes(page)


def noise(length, name):
    """Bytes without a zero."""
    output = b""
    while len(output) < length:
        output += hashlib.sha256(f"{name} {len(output)}".encode()).digest()
    return bytes(byte | 1 for byte in output[:length])


def made(name, lower, upper, special, body):
    page = bytearray(8192)
    page[:8] = bytes([0, 0, 0, 0, 0x8F, 0x4D, 0x37, 0x6B])
    for at, value in ((12, lower), (14, upper), (16, special), (18, 0x2004)):
        put(page, at, value)
    body(page)
    put(page, 8, checksum(bytes(page), BLOCK))
    return bytes(page)


def items(page):
    """A page full of short rows, of which the second was redirected."""
    page[24:] = noise(8168, "items")
    for i in range(30):
        put(page, 24 + i * 4, 8160 - i * 32 | 1 << 15 | 29 << 17, 4)
    put(page, 28, 3 | 2 << 15, 4)


def middle(page):
    """Sixteen zero bytes in the midst of others, at an even byte."""
    page[24:] = noise(8168, "middle")
    page[5001:5019] = bytes(18)


def map_of_most(page):
    page[24:] = bytes([0xFF, 0x7D, 0x34, 0x0F] * 2042)


def no_room(page):
    page[24:] = noise(8168, "no room")


def hole(page):
    """Zeros from an odd byte on, that cross a multiple of 256; the rest of the hole has old bytes."""
    page[24:] = noise(8168, "hole")
    page[249:266] = bytes(17)


PLAIN = {
    "heap": (MAIN, (HERE / "plain-v1.page").read_bytes()),
    "items": (MAIN, made("items", 144, 144, 8192, items)),
    "hole": (MAIN, made("hole", 249, 400, 8192, hole)),
    "zeros": (MAIN, made("zeros", 40, 40, 8176, middle)),
    "vm": (VM, made("vm", 24, 8192, 8192, map_of_most)),
    "fsm": (FSM, made("fsm", 24, 8192, 8192, lambda page: None)),
    "short": (MAIN, made("short", 24, 24, 8192, no_room)),
}

if __name__ == "__main__":
    for name, (fork, plain) in PLAIN.items():
        if name != "heap":
            (HERE / f"plain-v2-{name}.page").write_bytes(plain)
        for mac, tag_of in (("polyval", polyval_tag), ("hmac", hmac_tag)):
            (HERE / f"sealed-v2-{mac}-{name}.page").write_bytes(seal(plain, fork, True, tag_of))
    plain = PLAIN["heap"][1]
    (HERE / "sealed-v2-polyval-no-checksums.page").write_bytes(seal(plain, MAIN, False, polyval_tag))
