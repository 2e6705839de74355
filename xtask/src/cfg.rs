//! Conditions of `cfg`: `all`, `any` and `not` over names and `name = "value"`.

use crate::tree::{Tree, split_at_commas, walk};

/// A condition.
pub(crate) enum Condition {
    All(Vec<Condition>),
    Any(Vec<Condition>),
    Not(Box<Condition>),
    /// A name, with its value if it has one.
    Is(String, Option<String>),
}

/// Each `cfg(..)`, `cfg!(..)` and `cfg_attr(.., ..)` in these tokens, with its line.
pub(crate) fn conditions(trees: &[Tree]) -> Vec<(usize, Condition)> {
    let mut found = Vec::new();
    walk(trees, &mut |_, here| {
        if let Some(condition) = condition_at(here) {
            found.push((here[0].line(), condition));
        }
    });
    found
}

/// The condition of a `cfg` that starts with these tokens.
pub(crate) fn condition_at(here: &[Tree]) -> Option<Condition> {
    let (name, rest) = here.split_first()?;
    if !name.is("cfg") && !name.is("cfg_attr") {
        return None;
    }
    let rest = match rest {
        [mark, rest @ ..] if mark.is_punct('!') => rest,
        rest => rest,
    };
    let inside = rest.first()?.group('(')?;
    Condition::parse(split_at_commas(inside).next()?)
}

impl Condition {
    fn parse(trees: &[Tree]) -> Option<Condition> {
        let (name, rest) = trees.split_first()?;
        let name = name.ident()?;
        match rest {
            [] => Some(Condition::Is(name.to_owned(), None)),
            [equals, value] if equals.is_punct('=') => {
                Some(Condition::Is(name.to_owned(), Some(value.string()?.to_owned())))
            }
            [group] => {
                let mut inner = split_at_commas(group.group('(')?).map(Condition::parse);
                match name {
                    "all" => Some(Condition::All(inner.collect::<Option<_>>()?)),
                    "any" => Some(Condition::Any(inner.collect::<Option<_>>()?)),
                    "not" => Some(Condition::Not(Box::new(inner.next()??))),
                    _ => None,
                }
            }
            _ => None,
        }
    }

    /// Whether the condition holds, given the known names and values; `None` if they do not decide
    /// it.
    pub(crate) fn holds(&self, known: &dyn Fn(&str, Option<&str>) -> Option<bool>) -> Option<bool> {
        // `all` is false as soon as one is false, and true if all are true; `any` is the opposite.
        let fold = |conditions: &[Condition], decisive: bool| {
            let results: Vec<_> = conditions.iter().map(|inner| inner.holds(known)).collect();
            if results.contains(&Some(decisive)) {
                Some(decisive)
            } else if results.contains(&None) {
                None
            } else {
                Some(!decisive)
            }
        };
        match self {
            Condition::All(conditions) => fold(conditions, false),
            Condition::Any(conditions) => fold(conditions, true),
            Condition::Not(condition) => condition.holds(known).map(|holds| !holds),
            Condition::Is(name, value) => known(name, value.as_deref()),
        }
    }

    /// Whether the condition depends on the major version of PostgreSQL.
    pub(crate) fn asks_for_major(&self) -> bool {
        match self {
            Condition::All(conditions) | Condition::Any(conditions) => {
                conditions.iter().any(Condition::asks_for_major)
            }
            Condition::Not(condition) => condition.asks_for_major(),
            Condition::Is(name, value) => major(name, value.as_deref()).is_some(),
        }
    }

    /// Whether the condition holds in a build for this major; `None` if it depends on something
    /// else.
    pub(crate) fn holds_on(&self, built_for: u32) -> Option<bool> {
        self.holds(&|name, value| major(name, value).map(|major| major == built_for))
    }

    /// Whether the condition holds only in tests.
    pub(crate) fn is_test_only(&self) -> bool {
        let in_build = |name: &str, value: Option<&str>| match (name, value) {
            ("test", None) | ("feature", Some("pg_test")) => Some(false),
            _ => None,
        };
        self.holds(&in_build) == Some(false)
    }
}

/// The major of `feature = "pg15"`.
fn major(name: &str, value: Option<&str>) -> Option<u32> {
    if name == "feature" { value?.strip_prefix("pg")?.parse().ok() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::parse;

    fn one(text: &str) -> Condition {
        conditions(&parse(text).unwrap()).remove(0).1
    }

    #[test]
    fn conditions_are_found_in_attributes_and_macros() {
        let text =
            "#[cfg(test)] fn f() {\n if cfg!(unix) {}\n m! { #[cfg_attr(not(test), inline)] }\n}";
        let lines: Vec<_> =
            conditions(&parse(text).unwrap()).iter().map(|(line, _)| *line).collect();
        assert_eq!(lines, [1, 2, 3]);
    }

    #[test]
    fn unknown_conditions_matter_only_where_they_decide() {
        let any = one("#[cfg(any(feature = \"pg15\", unix))] x");
        assert_eq!((any.holds_on(15), any.holds_on(16)), (Some(true), None));
        let all = one("#[cfg(all(not(feature = \"pg15\"), unix))] x");
        assert_eq!((all.holds_on(15), all.holds_on(16)), (Some(false), None));
    }

    #[test]
    fn tests_are_distinguished_from_other_code() {
        assert!(one("#[cfg(any(test, feature = \"pg_test\"))] x").is_test_only());
        assert!(one("#[cfg(all(test, unix))] x").is_test_only());
        assert!(!one("#[cfg(not(test))] x").is_test_only());
        assert!(!one("#[cfg(feature = \"pg15\")] x").is_test_only());
    }
}
