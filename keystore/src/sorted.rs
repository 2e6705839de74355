//! A map of few entries in a sorted vector, without room for more. Most files have one key: a node
//! of a `BTreeMap` has room for eleven.

use std::ops::Index;

/// The map.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SortedMap<K, V>(Vec<(K, V)>);

impl<K, V> Default for SortedMap<K, V> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<K: Ord, V> SortedMap<K, V> {
    fn find(&self, key: &K) -> Result<usize, usize> {
        self.0.binary_search_by(|(known, _)| known.cmp(key))
    }

    /// The value of a key.
    pub fn get(&self, key: &K) -> Option<&V> {
        let at = self.find(key).ok()?;
        self.0.get(at).map(|(_, value)| value)
    }

    /// Whether the key has a value.
    pub fn contains_key(&self, key: &K) -> bool {
        self.find(key).is_ok()
    }

    /// Sets the value of a key.
    pub fn insert(&mut self, key: K, value: V) {
        match self.find(&key) {
            Ok(at) => self.0[at].1 = value,
            Err(at) => {
                if self.0.is_empty() {
                    self.0.reserve_exact(1);
                }
                self.0.insert(at, (key, value));
            }
        }
    }

    /// Removes entries for which `keep` is false.
    pub fn retain(&mut self, mut keep: impl FnMut(&K, &V) -> bool) {
        self.0.retain(|(key, value)| keep(key, value));
    }

    /// The entry with the greatest key.
    pub fn last_key_value(&self) -> Option<(&K, &V)> {
        self.iter().next_back()
    }

    /// All entries, ascending.
    pub fn iter(&self) -> Iter<'_, K, V> {
        self.0.iter().map(|(key, value)| (key, value))
    }

    /// All keys, ascending.
    pub fn keys(&self) -> impl DoubleEndedIterator<Item = &K> {
        self.iter().map(|(key, _)| key)
    }

    /// All values, by key.
    pub fn values(&self) -> impl DoubleEndedIterator<Item = &V> {
        self.iter().map(|(_, value)| value)
    }

    /// Number of entries.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there is no entry.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Entries, ascending.
pub type Iter<'a, K, V> =
    std::iter::Map<std::slice::Iter<'a, (K, V)>, fn(&'a (K, V)) -> (&'a K, &'a V)>;

impl<'a, K: Ord, V> IntoIterator for &'a SortedMap<K, V> {
    type Item = (&'a K, &'a V);
    type IntoIter = Iter<'a, K, V>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl<K: Ord, V> Index<&K> for SortedMap<K, V> {
    type Output = V;

    fn index(&self, key: &K) -> &V {
        match self.find(key) {
            Ok(at) => &self.0[at].1,
            Err(_) => panic!("no entry for this key"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::SortedMap;

    #[test]
    fn entries_ascend_and_a_key_has_one_value() {
        let mut map = SortedMap::default();
        assert!(map.is_empty());
        for (key, value) in [(3, 'c'), (1, 'a'), (2, 'x'), (2, 'b')] {
            map.insert(key, value);
        }
        assert_eq!(map.iter().collect::<Vec<_>>(), [(&1, &'a'), (&2, &'b'), (&3, &'c')]);
        assert_eq!((map.get(&2), map.get(&4), map[&3]), (Some(&'b'), None, 'c'));
        assert_eq!(map.last_key_value(), Some((&3, &'c')));
        map.retain(|key, _| *key != 3);
        assert_eq!((map.len(), map.contains_key(&3)), (2, false));
        assert_eq!(map.keys().chain(&[7]).collect::<Vec<_>>(), [&1, &2, &7]);
        assert_eq!(map.values().collect::<Vec<_>>(), [&'a', &'b']);
    }
}
