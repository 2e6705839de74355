//! An independent statement of the rules, as tables.

use pagevault_cipher::CipherId;
use pagevault_core::policy::{Decision, Label, Labelled, Oid, Setting, Source};

use crate::world::*;

/// The expected decision for a relation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Expected {
    pub(crate) encrypted: bool,
    /// The cipher of a new file that replaces none.
    pub(crate) cipher: CipherId,
    pub(crate) source: Source,
}

/// What decides among tablespace, database and setting: with the setting off, and on. `t` and `d`:
/// the label of the tablespace or database; `s`: the setting; `-`: nothing.
const OF_PLACE: [(&str, &str, &str, &str); 9] = [
    ("none", "none", "-", "s"),
    ("none", "plaintext", "d", "d"),
    ("none", "encrypted", "d", "d"),
    ("plaintext", "none", "t", "t"),
    ("plaintext", "plaintext", "t", "t"),
    ("plaintext", "encrypted", "d", "d"),
    ("encrypted", "none", "t", "t"),
    ("encrypted", "plaintext", "t", "t"),
    ("encrypted", "encrypted", "t", "t"),
];

/// Relations that follow another: the relation, its leader, and the tablespace whose label counts.
/// Others are decided by themselves.
const FOLLOWS: [(Oid, Oid, Oid); 10] = [
    (INDEX, TABLE, TABLESPACE),
    (NEW_INDEX, TABLE, TABLESPACE),
    (TOAST, TABLE, TABLESPACE),
    (TOAST_INDEX, TABLE, TABLESPACE),
    (SEQUENCE, TABLE, TABLESPACE),
    (TRANSIENT, TABLE, TABLESPACE),
    (COPY, TABLE, TABLESPACE),
    (COPY_OF_OTHER, TABLE, TABLESPACE),
    (COPY_OF_SUPERUSER, TABLE, TABLESPACE),
    (SQUEEZED, TABLE, TABLESPACE),
];

fn word(label: Option<Label>) -> &'static str {
    match label {
        None => "none",
        Some(Label::Plaintext) => "plaintext",
        Some(Label::Encrypted(_)) => "encrypted",
    }
}

/// What the labels above a relation require, and which of them decides.
fn around(world: &World, oid: Oid, tablespace: Oid) -> Option<(Label, Source)> {
    let mut nearer: Vec<(Option<Label>, Labelled)> = Vec::new();
    if oid == TABLE && world.levels > 0 {
        nearer.push((world.label(OF_PARENT), Labelled::Relation(PARENT)));
    }
    if oid == TABLE && world.levels > 1 {
        nearer.push((world.label(OF_GRANDPARENT), Labelled::Relation(GRANDPARENT)));
    }
    if world.get(oid).schema == SCHEMA {
        nearer.push((world.label(OF_SCHEMA), Labelled::Schema(SCHEMA)));
    }
    for (label, object) in nearer {
        if let Some(label) = label {
            return Some((label, Source::Around(object)));
        }
    }
    let of = if tablespace == TABLESPACE { OF_TABLESPACE } else { OF_ELSEWHERE };
    let (tablespaces, database) = (world.label(of), world.label(OF_DATABASE));
    let row = OF_PLACE.iter().find(|row| (row.0, row.1) == (word(tablespaces), word(database)));
    let row = row.unwrap();
    match if world.default_encryption { row.3 } else { row.2 } {
        "t" => Some((tablespaces?, Source::Around(Labelled::Tablespace(tablespace)))),
        "d" => Some((database?, Source::Around(Labelled::Database(DATABASE)))),
        "s" => Some((Label::Encrypted(None), Source::Setting(Setting::DefaultEncryption))),
        _ => None,
    }
}

/// What a relation's own label requires, else the labels above it.
fn said(world: &World, oid: Oid, tablespace: Oid) -> Option<(Label, Source)> {
    let own = match oid {
        TABLE => world.label(OF_TABLE),
        INDEX | NEW_INDEX | TOAST | TOAST_INDEX => None,
        _ => world.label(OF_OTHERS),
    };
    own.map(|label| (label, Source::Own(oid))).or_else(|| around(world, oid, tablespace))
}

/// The expected decision for a relation that a user has created.
pub(crate) fn expected(world: &World, oid: Oid) -> Option<Expected> {
    let state = |(label, source): (Label, Source), like: Option<CipherId>| {
        let (encrypted, named) = match label {
            Label::Plaintext => (false, None),
            Label::Encrypted(named) => (true, named),
        };
        Expected { encrypted, cipher: named.or(like).unwrap_or(world.cipher), source }
    };
    let follows = FOLLOWS.iter().find(|row| row.0 == oid);
    let has_label = !matches!(oid, INDEX | NEW_INDEX | TOAST | TOAST_INDEX | TABLE);
    let own = world.label(OF_OTHERS).filter(|_| has_label);
    let Some((_, table, tablespace)) = follows.filter(|_| own.is_none()) else {
        return said(world, oid, world.get(oid).tablespace).map(|said| state(said, None));
    };
    let of_table = said(world, *table, *tablespace);
    let is_said_plain = of_table
        .is_some_and(|(label, source)| label == Label::Plaintext && source == Source::Own(*table));
    let is_said_encrypted = of_table.is_some_and(|(label, _)| label != Label::Plaintext);
    // The index of a TOAST table also follows the TOAST table, whose state is `others`.
    let leaders = if oid == TOAST_INDEX {
        vec![(*table, world.table), (TOAST, world.others)]
    } else {
        vec![(*table, world.table)]
    };
    let mut result = of_table.map(|said| state(said, None));
    let mut said_encrypted = is_said_encrypted;
    for (leader, current) in leaders {
        let Some(current) = current else { continue };
        if !said_encrypted && !is_said_plain {
            let follows = (Label::Encrypted(None), Source::Leader(leader));
            result = Some(state(follows, Some(current)));
            said_encrypted = true;
        } else {
            result = result.map(|it| match it.source {
                _ if named(&of_table).is_some() => it,
                _ => Expected { cipher: current, ..it },
            });
        }
    }
    // Rows of another owner's table must not be copied to a less protected place.
    if oid == COPY_OF_OTHER && !result.is_some_and(|result| result.encrypted) {
        return around(world, oid, TABLESPACE).map(|said| state(said, None));
    }
    // An owner can give any table such a name.
    if oid == SQUEEZED && !result.is_some_and(|result| result.encrypted) {
        let around = around(world, oid, world.get(oid).tablespace);
        return match around.map(|said| state(said, None)).filter(|around| around.encrypted) {
            None => result.map(|it| match it.source {
                Source::Own(_) => {
                    Expected { source: Source::Around(Labelled::Relation(*table)), ..it }
                }
                _ => it,
            }),
            around => around,
        };
    }
    result
}

fn named(said: &Option<(Label, Source)>) -> Option<CipherId> {
    match said {
        Some((Label::Encrypted(named), _)) => *named,
        _ => None,
    }
}

/// The visible part of a decision.
pub(crate) fn decided(world: &World, decision: Option<Decision>) -> Option<Expected> {
    decision.map(|decision| {
        let cipher = decision.cipher(None, world);
        Expected { encrypted: decision.is_encrypted(), cipher, source: decision.source }
    })
}
