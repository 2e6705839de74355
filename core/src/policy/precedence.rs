//! Which label decides where there are several: pure, over one small trait.
//!
//! docs/policy.md has the same rules as a table; the tests read it row by row.

use super::label::Label;

/// What can be asked about the surroundings of a relation.
pub trait Surroundings {
    /// Something that may have a label.
    type Object: Copy;
    /// Why a question has no answer.
    type Error;

    /// The label of an object.
    ///
    /// # Errors
    /// When it cannot be read.
    fn label_of(&self, object: Self::Object) -> Result<Option<Label>, Self::Error>;

    /// The partitioned table that an object is a partition of.
    ///
    /// # Errors
    /// When that cannot be read.
    fn parent_of(&self, object: Self::Object) -> Result<Option<Self::Object>, Self::Error>;

    /// `pagevault.default_encryption`
    fn default_encryption(&self) -> bool;
}

/// What decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source<Object> {
    /// The label of this.
    Label(Object),
    /// `pagevault.default_encryption`
    Setting,
}

/// Where a relation without a label of its own lies.
#[derive(Clone, Copy, Debug)]
pub struct Location<Object> {
    /// The partitioned table that it is a partition of.
    pub parent: Option<Object>,
    /// Its schema.
    pub schema: Object,
    /// Its tablespace.
    pub tablespace: Object,
    /// Its database.
    pub database: Object,
}

/// A decision, and what made it; `None` if nothing says anything.
pub type Decided<Object> = Option<(Label, Source<Object>)>;

/// What is said around a relation: by the partitioned tables above it, its schema, its place.
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

/// What tablespace, database and setting say.
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
            Who::Tablespace => Source::Label(tablespace),
            Who::Database => Source::Label(database),
            Who::Setting => Source::Setting,
        };
        (label, source)
    }))
}

/// Which of the three makes the decision of [`among`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Who {
    /// The label of the tablespace.
    Tablespace,
    /// The label of the database.
    Database,
    /// `pagevault.default_encryption`
    Setting,
}

/// Tablespaces are shared by databases that know nothing of each other: neither says less than the
/// other wants. So `encrypted` of either comes first, the nearer one's with its cipher; then
/// `plaintext` of either; then the setting.
#[must_use]
pub fn among(
    tablespace: Option<Label>,
    database: Option<Label>,
    default_encryption: bool,
) -> Option<(Label, Who)> {
    let said = [(tablespace, Who::Tablespace), (database, Who::Database)];
    let said = || said.iter().filter_map(|(label, who)| Some(((*label)?, *who)));
    said()
        .find(|(label, _)| is_encrypted(*label))
        .or_else(|| said().next())
        .or_else(|| default_encryption.then_some((Label::Encrypted(None), Who::Setting)))
}

fn is_encrypted(label: Label) -> bool {
    matches!(label, Label::Encrypted(_))
}

fn wants_encryption<Who>(decided: Option<(Label, Who)>) -> bool {
    decided.is_some_and(|(label, _)| is_encrypted(label))
}

/// A label that is changed.
#[derive(Clone, Copy, Debug)]
pub struct Change {
    /// What it was.
    pub from: Option<Label>,
    /// What it becomes.
    pub to: Option<Label>,
}

impl Change {
    /// True if a tablespace's label wanted something encrypted in a database that says so of
    /// itself, and does not after the change.
    #[must_use]
    pub fn of_tablespace_loses(self, database: Option<Label>, default_encryption: bool) -> bool {
        let wants = |label| wants_encryption(among(label, database, default_encryption));
        wants(self.from) && !wants(self.to)
    }

    /// The same for a database's label. It alone wants the catalogs encrypted; and whatever
    /// tablespaces are labelled, there are others.
    #[must_use]
    pub fn of_database_loses(self, default_encryption: bool) -> bool {
        let wants = |label: Option<Label>| label.is_some_and(is_encrypted);
        let anything = |label| wants_encryption(among(None, label, default_encryption));
        (wants(self.from) && !wants(self.to)) || (anything(self.from) && !anything(self.to))
    }

    /// The same for a schema's label, which outranks all tablespaces with these labels.
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

    /// Objects are numbers; a partitioned table's parent is the next one.
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

    /// Two partitioned tables or fewer, schema, tablespace, database, each with every label.
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

    /// What a row of the table says of a world.
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

    /// Nobody who says `encrypted` of a whole is overruled by another whole.
    #[test]
    fn a_place_is_encrypted_if_either_says_so() {
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

    /// A change of a shared label loses something exactly where a relation would be decided
    /// otherwise.
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
        // The catalogs of a database follow its label alone.
        let catalogs = Change { from: Some(Label::Encrypted(None)), to: None };
        assert!(catalogs.of_database_loses(true));
    }
}
