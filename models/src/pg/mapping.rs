//! As the extension's module: memory of all processes, here of all threads.

/// A head and a table behind it.
pub(crate) struct Region<H: 'static, E: 'static = ()> {
    pub(crate) head: &'static H,
    pub(crate) entries: &'static [E],
}

impl<H, E> Clone for Region<H, E> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<H, E> Copy for Region<H, E> {}

impl<H: Default, E: Default> Region<H, E> {
    /// Zeros, for ever: a model visits few enough orders of events.
    pub(crate) fn new(entries: usize) -> Self {
        let head = Box::leak(Box::default());
        let entries: Vec<E> = (0..entries).map(|_| E::default()).collect();
        Self { head, entries: entries.leak() }
    }

    pub(crate) fn clear(&self) -> std::io::Result<()> {
        Err(std::io::ErrorKind::Unsupported.into())
    }
}

macro_rules! shared_struct {
    (
        $(#[$attribute:meta])*
        $visibility:vis struct $name:ident {
            $($(#[$of_field:meta])* $of:vis $field:ident: $type:ty,)*
        }
    ) => {
        $(#[$attribute])*
        #[derive(Default)]
        $visibility struct $name {
            $($(#[$of_field])* $of $field: $type,)*
        }
    };
}
pub(crate) use shared_struct;
