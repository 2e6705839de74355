//! Which of several labels decides.
//!
//! docs/policy.md has the same rules as a table, which the tests read.

use super::label::Label;

/// Labels and setting that may apply to a relation.
pub trait Surroundings {
    /// An object that may have a label.
    type Object: Copy;
    /// Why a label could not be read.
    type Error;

    /// The label of an object.
    ///
    /// # Errors
    /// If it cannot be read.
    fn label_of(&self, object: Self::Object) -> Result<Option<Label>, Self::Error>;

    /// The partitioned table that an object is a partition of.
    ///
    /// # Errors
    /// If the catalog cannot be read.
    fn parent_of(&self, object: Self::Object) -> Result<Option<Self::Object>, Self::Error>;

    /// `pagevault.default_encryption`
    fn default_encryption(&self) -> bool;
}

/// What a decision is based on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source<Object> {
    /// The label of this object.
    Label(Object),
    /// `pagevault.default_encryption`
    Setting,
}

/// The objects whose labels apply to a relation without a label of its own.
#[derive(Clone, Copy, Debug)]
pub struct Location<Object> {
    /// The partitioned table that the relation is a partition of.
    pub parent: Option<Object>,
    /// Its schema.
    pub schema: Object,
    /// Its tablespace.
    pub tablespace: Object,
    /// Its database.
    pub database: Object,
}

/// The label that decides, and where it comes from; `None` if none applies.
pub type Decided<Object> = Option<(Label, Source<Object>)>;

/// Decides from the partitioned tables above a relation, its schema, tablespace and database, and
/// the setting.
///
/// # Errors
/// Those of `around`.
pub fn below<S: Surroundings>(
    around: &S,
    at: Location<S::Object>,
) -> Result<Decided<S::Object>, S::Error> {
    let mut parent = at.parent;
    while let Some(table) = parent {
        if let Some(label) = around.label_of(table)? {
            return Ok(Some((label, Source::Label(table))));
        }
        parent = around.parent_of(table)?;
    }
    match around.label_of(at.schema)? {
        Some(label) => Ok(Some((label, Source::Label(at.schema)))),
        None => of_place(around, at.tablespace, at.database),
    }
}

/// Decides from tablespace, database and setting.
///
/// # Errors
/// Those of `around`.
pub fn of_place<S: Surroundings>(
    around: &S,
    tablespace: S::Object,
    database: S::Object,
) -> Result<Decided<S::Object>, S::Error> {
    let labels = (around.label_of(tablespace)?, around.label_of(database)?);
    Ok(among(labels.0, labels.1, around.default_encryption()).map(|(label, who)| {
        let source = match who {
            DecidedBy::Tablespace => Source::Label(tablespace),
            DecidedBy::Database => Source::Label(database),
            DecidedBy::Setting => Source::Setting,
        };
        (label, source)
    }))
}

/// Where the result of [`among`] comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecidedBy {
    /// The label of the tablespace.
    Tablespace,
    /// The label of the database.
    Database,
    /// `pagevault.default_encryption`
    Setting,
}

/// Decides between the labels of tablespace and database, and the setting.
///
/// Databases that share a tablespace may have different authors of labels. So neither tablespace
/// nor database can cancel encryption that the other requires: `encrypted` on either decides, then
/// `plaintext` on either, then the setting. Where both are equal the tablespace's label decides,
/// with its cipher.
#[must_use]
pub fn among(
    tablespace: Option<Label>,
    database: Option<Label>,
    default_encryption: bool,
) -> Option<(Label, DecidedBy)> {
    let labels = [(tablespace, DecidedBy::Tablespace), (database, DecidedBy::Database)];
    let labels = || labels.iter().filter_map(|(label, who)| Some(((*label)?, *who)));
    labels()
        .find(|(label, _)| is_encrypted(*label))
        .or_else(|| labels().next())
        .or_else(|| default_encryption.then_some((Label::Encrypted(None), DecidedBy::Setting)))
}

fn is_encrypted(label: Label) -> bool {
    matches!(label, Label::Encrypted(_))
}

fn wants_encryption<By>(decided: Option<(Label, By)>) -> bool {
    decided.is_some_and(|(label, _)| is_encrypted(label))
}

/// A change of a label.
#[derive(Clone, Copy, Debug)]
pub struct Change {
    /// The old label.
    pub from: Option<Label>,
    /// The new label.
    pub to: Option<Label>,
}

impl Change {
    /// For the label of a tablespace: true if relations in it lose encryption, in a database with
    /// this label and setting.
    #[must_use]
    pub fn of_tablespace_loses(self, database: Option<Label>, default_encryption: bool) -> bool {
        let wants = |label| wants_encryption(among(label, database, default_encryption));
        wants(self.from) && !wants(self.to)
    }

    /// For the label of a database: true if anything in it loses encryption. Nothing else covers
    /// the catalogs, and tablespaces without a label may exist whatever labels others have.
    #[must_use]
    pub fn of_database_loses(self, default_encryption: bool) -> bool {
        let wants = |label: Option<Label>| label.is_some_and(is_encrypted);
        let anything = |label| wants_encryption(among(None, label, default_encryption));
        (wants(self.from) && !wants(self.to)) || (anything(self.from) && !anything(self.to))
    }

    /// For the label of a schema, which outranks those of all these tablespaces.
    #[must_use]
    pub fn of_schema_loses(
        self,
        tablespaces: &[Option<Label>],
        database: Option<Label>,
        default_encryption: bool,
    ) -> bool {
        tablespaces.iter().chain([&None]).any(|tablespace| {
            let place = among(*tablespace, database, default_encryption).map(|(label, _)| label);
            let wants = |label: Option<Label>| label.or(place).is_some_and(is_encrypted);
            wants(self.from) && !wants(self.to)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagevault_cipher::CipherId;
    use std::convert::Infallible;

    const LABELS: [Option<Label>; 4] = [
        None,
        Some(Label::Plaintext),
        Some(Label::Encrypted(None)),
        Some(Label::Encrypted(Some(CipherId::Aes128Xts))),
    ];

    /// A model in which objects are numbers; the parent of a partitioned table is the next number.
    struct World {
        labels: [Option<Label>; 5],
        parents: usize,
        setting: bool,
    }

    const SCHEMA: usize = 2;
    const TABLESPACE: usize = 3;
    const DATABASE: usize = 4;

    impl Surroundings for World {
        type Object = usize;
        type Error = Infallible;

        fn label_of(&self, object: usize) -> Result<Option<Label>, Infallible> {
            Ok(self.labels[object])
        }

        fn parent_of(&self, object: usize) -> Result<Option<usize>, Infallible> {
            Ok((object + 1 < self.parents).then_some(object + 1))
        }

        fn default_encryption(&self) -> bool {
            self.setting
        }
    }

    /// All combinations: up to two partitioned tables, schema, tablespace and database, each with
    /// every label, and the setting.
    fn worlds() -> impl Iterator<Item = World> {
        (0..4usize.pow(5) * 3 * 2).map(|number| {
            let label = |digit: u32| LABELS[number / 4usize.pow(digit) % 4];
            let rest = number / 4usize.pow(5);
            World {
                labels: [label(0), label(1), label(2), label(3), label(4)],
                parents: rest % 3,
                setting: rest / 3 == 1,
            }
        })
    }

    /// The table of docs/policy.md: tablespace, database, setting off, setting on.
    fn documented() -> Vec<[String; 4]> {
        let text = include_str!("../../../docs/policy.md");
        let is_head = |line: &&str| line.starts_with("| tablespace | database |");
        let rows = text.lines().skip_while(|line| !is_head(line)).skip(2);
        rows.take_while(|line| line.starts_with('|'))
            .map(|line| {
                let cells: Vec<_> = line.trim_matches('|').split('|').map(str::trim).collect();
                <[&str; 4]>::try_from(cells).expect("four columns").map(str::to_owned)
            })
            .collect()
    }

    fn word(label: Option<Label>) -> &'static str {
        match label {
            None => "none",
            Some(Label::Plaintext) => "`plaintext`",
            Some(Label::Encrypted(_)) => "`encrypted`",
        }
    }

    /// The cell of the documented table for a combination.
    fn documented_in(world: &World, table: &[[String; 4]]) -> String {
        let at = |object| word(world.labels[object]);
        let mut rows =
            table.iter().filter(|row| row[0] == at(TABLESPACE) && row[1] == at(DATABASE));
        let row = rows.next().expect("a row for each pair of labels");
        assert!(rows.next().is_none(), "one row for each pair of labels");
        row[if world.setting { 3 } else { 2 }].clone()
    }

    #[test]
    fn the_nearest_label_decides_and_places_as_documented() {
        let table = documented();
        assert_eq!(table.len(), 9, "{table:?}");
        for world in worlds() {
            let at = Location {
                parent: (world.parents > 0).then_some(0),
                schema: SCHEMA,
                tablespace: TABLESPACE,
                database: DATABASE,
            };
            let Ok(decided) = below(&world, at);
            let nearer = (0..world.parents).chain([SCHEMA]);
            if let Some(object) = nearer.into_iter().find(|object| world.labels[*object].is_some())
            {
                let label = world.labels[object].expect("a label");
                assert_eq!(decided, Some((label, Source::Label(object))));
                continue;
            }
            let said = match decided {
                None => "nothing".to_owned(),
                Some((label, source)) => {
                    let who = match source {
                        Source::Label(TABLESPACE) => "tablespace",
                        Source::Label(DATABASE) => "database",
                        Source::Label(_) => "something else",
                        Source::Setting => "setting",
                    };
                    if let Source::Label(object) = source {
                        assert_eq!(Some(label), world.labels[object], "with its cipher");
                    }
                    format!("{}: {who}", word(Some(label)))
                }
            };
            assert_eq!(said, documented_in(&world, &table));
            assert_eq!(of_place(&world, TABLESPACE, DATABASE), Ok(decided));
        }
    }

    /// Neither label can cancel encryption that the other requires.
    #[test]
    fn tablespace_or_database_alone_can_require_encryption() {
        for tablespace in LABELS {
            for database in LABELS {
                for setting in [false, true] {
                    let says = |label: Option<Label>| label.is_some_and(is_encrypted);
                    let plaintext = [tablespace, database].contains(&Some(Label::Plaintext));
                    let wanted = says(tablespace) || says(database) || (setting && !plaintext);
                    assert_eq!(wants_encryption(among(tablespace, database, setting)), wanted);
                }
            }
        }
    }

    /// A change of a label removes encryption exactly where the decision for some relation changes
    /// so.
    #[test]
    fn losses_are_those_of_relations() {
        for from in LABELS {
            for to in LABELS {
                let change = Change { from, to };
                for other in LABELS {
                    for setting in [false, true] {
                        let relation = |tablespace, database| {
                            let world = World {
                                labels: [None, None, None, tablespace, database],
                                parents: 0,
                                setting,
                            };
                            let Ok(decided) = of_place(&world, TABLESPACE, DATABASE);
                            wants_encryption(decided)
                        };
                        assert_eq!(
                            change.of_tablespace_loses(other, setting),
                            relation(from, other) && !relation(to, other)
                        );
                        if relation(other, from) && !relation(other, to) {
                            assert!(change.of_database_loses(setting));
                        }
                        for database in LABELS {
                            let schema = |label: Option<Label>| match label {
                                Some(label) => is_encrypted(label),
                                None => relation(other, database),
                            };
                            if schema(from) && !schema(to) {
                                assert!(change.of_schema_loses(&[other], database, setting));
                            }
                        }
                    }
                }
            }
            let same = Change { from, to: from };
            assert!(!same.of_database_loses(true) && !same.of_tablespace_loses(None, true));
            assert!(!same.of_schema_loses(&LABELS, None, true));
        }
        // The catalogs of a database depend on its label alone.
        let catalogs = Change { from: Some(Label::Encrypted(None)), to: None };
        assert!(catalogs.of_database_loses(true));
    }
}
