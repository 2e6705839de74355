//! A column of every type, each with a value whose stored bytes are known.
//!
//! Values of fewer than eight bytes may occur by chance, so `int`, `date`, `boolean` and similar
//! types are left out. They are in the same pages as the others.

use pagevault_tests::leaks::Canary;

use super::workload::{Place, Workload};

const HERE: Place = Place::Relation("typed");

pub(super) fn add(work: &mut Workload) {
    work.run("CREATE TYPE pair AS (a text, b int)");
    work.run("CREATE DOMAIN short AS text CHECK (length(VALUE) < 100)");
    work.run("CREATE TYPE textrange AS RANGE (subtype = text, collation = \"C\")");
    let columns = [texts(work), numbers(work), binaries(work)].concat();
    let definitions: Vec<_> =
        columns.iter().map(|(name, kind, _)| format!("{name} {kind}")).collect();
    let values: Vec<_> = columns.iter().map(|(_, _, value)| value.as_str()).collect();
    work.run(format!("CREATE TABLE typed ({})", definitions.join(", ")));
    work.run(format!("INSERT INTO typed VALUES ({})", values.join(", ")));
}

/// Name, type and value.
type Column = (&'static str, &'static str, String);

fn texts(work: &mut Workload) -> Vec<Column> {
    let mut column = |name: &'static str, kind: &'static str, value: &dyn Fn(&str) -> String| {
        let text = work.text(&format!("type {name}"), HERE);
        (name, kind, value(&text))
    };
    vec![
        column("t", "text", &|t| format!("'{t}'")),
        column("v", "varchar", &|t| format!("'{t}'")),
        column("c", "char(40)", &|t| format!("'{t}'")),
        column("n", "name", &|t| format!("'{t}'")),
        column("d", "short", &|t| format!("'{t}'")),
        column("p", "pair", &|t| format!("ROW('{t}', 1)")),
        column("j", "json", &|t| format!("'{{\"a\": \"{t}\"}}'")),
        column("jb", "jsonb", &|t| format!("'{{\"a\": [\"{t}\"]}}'")),
        column("jbk", "jsonb", &|t| format!("'{{\"{t}\": 1}}'")),
        column("jp", "jsonpath", &|t| format!("'$.\"{t}\"'")),
        column("a", "text[]", &|t| format!("ARRAY['x', '{t}']")),
        column("tv", "tsvector", &|t| format!("to_tsvector('simple', 'a {t}')")),
        column("tq", "tsquery", &|t| format!("'a & {t}'")),
        column("tr", "textrange", &|t| format!("textrange('{t}', '~')")),
    ]
}

fn numbers(work: &mut Workload) -> Vec<Column> {
    let big = work.number("type big", HERE);
    let in_array = work.number("type bigs", HERE);
    let low = work.number("type range", HERE);
    let lsn = work.number("type lsn", HERE).cast_unsigned();
    // Seven bytes, so that the value is a valid timestamp; with a zero byte it has eight.
    let mut seven = |name: &str| {
        let number = Canary::number(name).1 & 0x00ff_ffff_ffff_ffff;
        work.stored(name, &number.to_le_bytes(), HERE);
        number
    };
    let (money, moment, span) = (seven("type money"), seven("type moment"), seven("type span"));
    let float = seven("type float") as u64 & 0x000f_ffff_ffff_ffff | 0x4120_0000_0000_0000;
    work.stored("type float", &float.to_le_bytes(), HERE);
    // Numeric: four digits in two bytes, most significant first.
    let digits = |bytes: &[u8]| -> Vec<u16> {
        let pairs = bytes.as_chunks().0.iter().map(|pair| u16::from_le_bytes(*pair));
        pairs.map(|digit| digit % 8999 + 1000).collect()
    };
    let digits = digits(&Canary::binary("type numeric", 16).bytes);
    let stored: Vec<u8> = digits.iter().flat_map(|digit| digit.to_le_bytes()).collect();
    work.stored("type numeric", &stored, HERE);
    let numeric: String = digits.iter().map(ToString::to_string).collect();
    let microseconds = |number: i64| format!("interval '{number} microseconds'");
    vec![
        ("big", "bigint", format!("'{big}'")),
        ("bigs", "bigint[]", format!("ARRAY['{in_array}'::bigint]")),
        ("r", "int8range", format!("int8range('{low}', NULL)")),
        ("mr", "int8multirange", format!("int8multirange(int8range(NULL, '{low}'))")),
        ("lsn", "pg_lsn", format!("'{:X}/{:X}'", lsn >> 32, lsn & 0xffff_ffff)),
        ("money", "money", format!("({money}::numeric / 100)::money")),
        (
            "moment",
            "timestamptz",
            format!("'2000-01-01 UTC'::timestamptz + {}", microseconds(moment)),
        ),
        ("span", "interval", microseconds(span)),
        ("float", "double precision", format!("'{:?}'", f64::from_bits(float))),
        ("num", "numeric", numeric),
    ]
}

fn binaries(work: &mut Workload) -> Vec<Column> {
    let mut hex = |name: &str, count| work.hex(&format!("type {name}"), count, HERE);
    let (bytes, uuid, bits, mac) =
        (hex("bytea", 20), hex("uuid", 16), hex("bits", 20), hex("mac", 8));
    let address = hex("inet", 16);
    let groups: Vec<_> = (0..8).map(|at| &address[at * 4..at * 4 + 4]).collect();
    vec![
        ("by", "bytea", format!("'\\x{bytes}'")),
        ("u", "uuid", format!("'{uuid}'")),
        ("bits", "bit varying", format!("X'{bits}'")),
        ("mac", "macaddr8", format!("'{mac}'")),
        ("addr", "inet", format!("'{}'", groups.join(":"))),
    ]
}
