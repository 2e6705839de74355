//! Enforcement: what is refused.

use pagevault_core::policy::enforcement::{
    SchemaLoss, View, against_schema_label, forbidden_by, takes_encryption_away,
};
use pagevault_core::policy::precedence::Change;
use pagevault_core::policy::{Label, Labelled, Oid, Policy, Setting, Source};

use crate::world::*;

fn is_encrypted(label: Option<Label>) -> bool {
    matches!(label, Some(Label::Encrypted(_)))
}

/// Enforcement refuses plaintext exactly where a label or a setting requires encryption.
#[test]
fn plaintext_is_refused_exactly_where_encryption_is_wanted() {
    for mut world in World::all(&[OF_TABLE, OF_PARENT, OF_SCHEMA, OF_TABLESPACE, OF_OTHERS], 1) {
        for enforces in [false, true] {
            world.enforces = enforces;
            for oid in USERS {
                let refused = Policy::of(&world).against_plaintext(&world.get(oid)).unwrap();
                let is_plaintext = if oid == TABLE { world.table } else { world.others }.is_none();
                let lasts = oid != TEMPORARY;
                let expected = enforces && lasts && is_plaintext && world.wants_encryption(oid);
                assert_eq!(refused.is_some(), expected, "{oid} in {world:?}");
            }
        }
    }
}

/// With enforcement, no change of a label that is permitted removes encryption from the relation or
/// one of its partitions.
#[test]
fn labels_of_relations_take_nothing_away() {
    for mut world in World::all(&[OF_TABLE, OF_PARENT, OF_SCHEMA, OF_DATABASE], 1) {
        for (place, labelled) in [(OF_TABLE, TABLE), (OF_PARENT, PARENT)] {
            for label in LABELS {
                let after = world.with_label(place, label);
                let loses = world.wants_encryption(TABLE) && !after.wants_encryption(TABLE);
                for enforces in [false, true] {
                    world.enforces = enforces;
                    let relations = [world.get(TABLE)];
                    let refused =
                        Policy::of(&world).against_label(labelled, label, &relations).unwrap();
                    assert_eq!(refused.is_some(), enforces && loses, "{label:?} in {world:?}");
                    assert!(refused.is_none_or(|because| because.is_encrypted()));
                }
            }
        }
    }
}

#[test]
fn changes_that_take_encryption_away() {
    for from in LABELS {
        for to in LABELS {
            let expected = to == Some(Label::Plaintext) || (to.is_none() && is_encrypted(from));
            assert_eq!(takes_encryption_away(from, to).is_some(), expected);
            // A change that needs no administrator removes encryption nowhere.
            if !expected {
                for world in World::all(&[OF_SCHEMA, OF_TABLESPACE, OF_DATABASE], 0) {
                    let (before, after) =
                        (world.with_label(OF_TABLE, from), world.with_label(OF_TABLE, to));
                    assert!(!before.wants_encryption(TABLE) || after.wants_encryption(TABLE));
                }
            }
        }
    }
}

/// Labels of tablespaces and databases, compared with the decision for every relation there that
/// has no label of its own.
#[test]
fn shared_labels_take_nothing_away_from_any_database() {
    for world in World::all(&[OF_TABLESPACE, OF_DATABASE], 0) {
        for to in LABELS {
            for (place, object) in [
                (OF_TABLESPACE, Labelled::Tablespace(TABLESPACE)),
                (OF_DATABASE, Labelled::Database(DATABASE)),
            ] {
                let change = Change { from: world.label(place), to };
                let after = world.with_label(place, to);
                let loses = |oid: Oid| world.wants_encryption(oid) && !after.wants_encryption(oid);
                // Other tablespaces have relations, too.
                let elsewhere = object != Labelled::Tablespace(TABLESPACE) && loses(FREE_SEQUENCE);
                let loses = loses(TABLE) || loses(CATALOG) || elsewhere;
                for enforces in [false, true] {
                    let view = View {
                        database: DATABASE,
                        label: world.label(OF_DATABASE),
                        default_encryption: world.default_encryption,
                        enforces,
                    };
                    let views = [view];
                    let refused = forbidden_by(&views, DATABASE, object, change);
                    assert_eq!(
                        refused.is_some(),
                        enforces && loses,
                        "{object:?} to {to:?}: {world:?}"
                    );
                }
            }
        }
    }
}

/// The label of a database concerns only itself, that of a tablespace all databases. The current
/// database is reported first.
#[test]
fn which_database_forbids_a_change() {
    let view =
        |database, label, enforces| View { database, label, default_encryption: false, enforces };
    let views = [view(9, None, true), view(7, None, true), view(5, None, false)];
    let change = Change { from: Some(Label::Encrypted(None)), to: None };
    let by = |here, object| forbidden_by(&views, here, object, change).map(|view| view.database);
    assert_eq!(by(9, Labelled::Tablespace(1)), Some(9));
    assert_eq!(by(5, Labelled::Tablespace(1)), Some(7));
    assert_eq!(by(5, Labelled::Database(9)), Some(9));
    assert_eq!(by(9, Labelled::Database(5)), None, "not enforced there");
    assert_eq!(by(9, Labelled::Database(6)), None, "not there");
    assert_eq!(by(9, Labelled::Schema(1)), None);
    let labelled = [view(9, Some(Label::Encrypted(None)), true)];
    assert_eq!(
        forbidden_by(&labelled, 9, Labelled::Tablespace(1), change),
        None,
        "it says so itself"
    );
}

#[test]
fn settings_of_this_database_and_of_others() {
    let choices = [None, Some(false), Some(true)];
    for set in choices {
        for enforced in choices {
            for (default, enforces) in [(false, false), (false, true), (true, false), (true, true)]
            {
                let here = View::new((5, 5), None, (set, default), (enforced, enforces));
                // In its own database the session's values count.
                assert_eq!((here.default_encryption, here.enforces), (default, enforces));
                let there = View::new((6, 5), None, (set, default), (enforced, enforces));
                assert_eq!(there.default_encryption, set.unwrap_or(default));
                assert_eq!(there.enforces, enforces || enforced == Some(true));
            }
        }
    }
}

#[test]
fn labels_of_schemas_take_nothing_away() {
    for world in World::all(&[OF_SCHEMA, OF_TABLESPACE, OF_DATABASE], 0) {
        for to in LABELS {
            let after = world.with_label(OF_SCHEMA, to);
            let change = Change { from: world.label(OF_SCHEMA), to };
            let loses = |oid: Oid| world.wants_encryption(oid) && !after.wants_encryption(oid);
            let tablespaces = [(TABLESPACE, world.label(OF_TABLESPACE))];
            let database = (DATABASE, world.label(OF_DATABASE));
            let refused =
                against_schema_label(change, &tablespaces, database, world.default_encryption);
            // A table in the labelled tablespace, and a relation in another one.
            let expected = loses(TABLE) || loses(FREE_SEQUENCE);
            assert_eq!(refused.is_some(), expected, "to {to:?}: {world:?}");
            if let Some(SchemaLoss(Some(source))) = refused {
                let is_known = matches!(
                    source,
                    Source::Around(Labelled::Tablespace(TABLESPACE) | Labelled::Database(DATABASE))
                        | Source::Setting(Setting::DefaultEncryption)
                );
                assert!(is_known, "{source:?}");
            }
        }
    }
}

/// A relation labelled plaintext comes to no place that requires encryption, even if the former one
/// did: the exception was made for that one. Where nothing else requires it than before, it stays.
#[test]
fn exceptions_do_not_move() {
    let elsewhere = Some(Source::Around(Labelled::Schema(99)));
    for mut world in World::all(&[OF_PARENT, OF_SCHEMA, OF_TABLESPACE, OF_DATABASE], 1) {
        world.labels[OF_TABLE] = Some(Label::Plaintext);
        let without = world.with_label(OF_TABLE, None).wanted(TABLE);
        let required = without.filter(|it| it.is_encrypted()).map(|it| it.source);
        let table = world.get(TABLE);
        let before = Policy::of(&world).required_without_label(&table).unwrap();
        assert_eq!(before, required, "{world:?}");
        for enforces in [false, true] {
            world.enforces = enforces;
            let refuses = |before, entered: &[Labelled]| {
                let policy = Policy::of(&world);
                policy.against_moving_plaintext(&table, before, entered).unwrap().is_some()
            };
            assert!(!refuses(required, &[]), "{world:?}");
            for before in [None, elsewhere] {
                assert_eq!(refuses(before, &[]), enforces && required.is_some(), "{world:?}");
            }
            for place in [Labelled::Schema(SCHEMA), Labelled::Tablespace(TABLESPACE)] {
                let expected = enforces && required == Some(Source::Around(place));
                assert_eq!(refuses(required, &[place]), expected, "{place:?}: {world:?}");
            }
        }
    }
    // What has no label, or no exception, is not concerned; a partitioned table is.
    let mut world = World { enforces: true, levels: 1, ..World::default() };
    world.labels[OF_SCHEMA] = Some(Label::Encrypted(None));
    for (label, of_table, of_parent) in [
        (None, false, false),
        (Some(Label::Plaintext), true, true),
        (Some(Label::Encrypted(None)), false, false),
    ] {
        world.labels[OF_TABLE] = label;
        world.labels[OF_PARENT] = label;
        for (oid, expected) in [(TABLE, of_table), (PARENT, of_parent)] {
            let above =
                if oid == TABLE { world.with_label(OF_PARENT, None) } else { world.clone() };
            let policy = Policy::of(&above);
            let refused = policy.against_moving_plaintext(&above.get(oid), None, &[]).unwrap();
            assert_eq!(refused.is_some(), expected, "{oid} {label:?}");
        }
    }
}

/// A job stops decrypting where a label requires encryption, or a setting that is enforced.
#[test]
fn nothing_is_decrypted_that_a_label_wants_encrypted() {
    for mut world in World::all(&[OF_TABLE, OF_SCHEMA, OF_DATABASE, OF_OTHERS], 0) {
        for enforces in [false, true] {
            world.enforces = enforces;
            for oid in USERS.into_iter().chain([CATALOG, SHARED_CATALOG, 2619]) {
                let relation = world.get(oid);
                let wanted = world.wanted(oid).filter(|wanted| wanted.is_encrypted());
                let by_label = wanted.is_some_and(|wanted| {
                    matches!(wanted.source, Source::Own(_) | Source::Around(_))
                });
                let by_setting =
                    wanted.is_some_and(|wanted| matches!(wanted.source, Source::Setting(_)));
                let by_leader =
                    wanted.is_some_and(|wanted| matches!(wanted.source, Source::Leader(_)));
                let policy = Policy::of(&world);
                let refused = policy.against_decrypting(&relation).unwrap();
                let enforced = by_setting && enforces;
                assert_eq!(refused.is_some(), by_label || (enforced && relation.user_made));
                let refused = policy.against_resuming_decryption(&relation).unwrap();
                assert_eq!(refused.is_some(), by_label || enforced || by_leader);
            }
        }
    }
}
