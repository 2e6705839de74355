//! A program's exports and constants, wherever they are read: in memory or in a file.

use crate::elf::{Elf, Symbol, SymbolKind};
use crate::error::Error;
use crate::find::{self, Region};

/// Two members of a table are at most this many words apart.
///
/// PostgreSQL's `f_smgr` has 15 to 20. Symbols in `.dynsym` take three words each, so even
/// neighbouring symbols there are not taken for a table of twelve members or more.
pub const TABLE_WINDOW: usize = 32;

/// An exported object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Object {
    /// Run-time address.
    pub address: usize,
    /// Size in bytes.
    pub size: usize,
}

/// A function pointer in a table or an exported object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Pointer {
    /// For messages.
    pub(crate) what: String,
    pub(crate) address: usize,
    pub(crate) value: usize,
}

/// A program as it is loaded, and the search for its parts.
pub(crate) trait Program {
    /// Path of the program, for messages.
    fn path(&self) -> &str;
    /// Its headers and symbols.
    fn elf(&self) -> &Elf;
    /// Difference between run-time and linked addresses.
    fn bias(&self) -> usize;
    /// A word of the image; `None` if it lies outside or may not be read.
    fn word(&self, address: usize) -> Result<Option<usize>, Error>;
    /// Passes the read-only data to `search`: the segments that are never writable, and RELRO.
    fn search_read_only<R>(&self, search: impl FnOnce(&[Region<'_>]) -> R) -> Result<R, Error>;

    /// Whether the address lies in the program's own image.
    fn owns(&self, address: usize) -> bool {
        let linked = address.wrapping_sub(self.bias()) as u64;
        self.elf().segments.iter().any(|segment| segment.holds(linked, 1))
    }

    /// Whether the address lies in the program's own code.
    fn is_code(&self, address: usize) -> bool {
        let linked = address.wrapping_sub(self.bias()) as u64;
        self.elf().segments.iter().any(|segment| segment.executable && segment.holds(linked, 1))
    }

    /// Address of the program's own definition of an exported function.
    fn function_address(&self, symbol: &str) -> Result<usize, Error> {
        let address = self.address_of(&self.definition(symbol, SymbolKind::Function)?);
        if self.is_code(address) { Ok(address) } else { Err(self.missing("function", symbol)) }
    }

    /// The program's own definition of an exported object.
    fn object(&self, symbol: &str) -> Result<Object, Error> {
        let found = self.definition(symbol, SymbolKind::Object)?;
        if !self.elf().segments.iter().any(|s| s.holds(found.address, found.size)) {
            return Err(self.missing("object", symbol));
        }
        Ok(Object { address: self.address_of(&found), size: found.size as usize })
    }

    /// The members of a table of constants, in the order of `names`: see [`crate::Plan::table`].
    fn table(&self, table: &str, names: &[&str]) -> Result<Vec<Pointer>, Error> {
        let functions: Vec<usize> =
            names.iter().map(|name| self.function_address(name)).collect::<Result<_, _>>()?;
        let places = self
            .search_read_only(|regions| find::exactly_once(regions, &functions, TABLE_WINDOW))?
            .map_err(|failure| self.not_once(table, names, failure))?;
        let members = names.iter().zip(places).zip(functions);
        Ok(members
            .map(|((name, address), value)| Pointer {
                what: format!("\"{name}\" in table \"{table}\""),
                address,
                value,
            })
            .collect())
    }

    /// The pointer at `offset` bytes into an exported object.
    fn field(&self, object: &str, offset: usize) -> Result<Pointer, Error> {
        let found = self.object(object)?;
        let outside =
            || Error::FieldOutside { symbol: object.to_owned(), size: found.size, offset };
        let end = offset.checked_add(size_of::<usize>()).ok_or_else(outside)?;
        if end > found.size {
            return Err(outside());
        }
        let address = found.address + offset;
        let value = self.word(address)?.ok_or_else(outside)?;
        Ok(Pointer { what: format!("\"{object}\" offset {offset}"), address, value })
    }

    /// As [`Program::field`]; the pointer must hold a function of the program itself.
    fn own_function(&self, object: &str, offset: usize) -> Result<Pointer, Error> {
        let field = self.field(object, offset)?;
        if self.is_code(field.value) {
            return Ok(field);
        }
        Err(field.unexpected(format!("a function of {}", self.path())))
    }

    /// As [`Program::field`]; the pointer must be null.
    fn null(&self, object: &str, offset: usize) -> Result<(), Error> {
        match self.field(object, offset)? {
            Pointer { value: 0, .. } => Ok(()),
            field => Err(field.unexpected("null".to_owned())),
        }
    }

    #[doc(hidden)]
    fn definition(&self, symbol: &str, kind: SymbolKind) -> Result<Symbol, Error> {
        let exports = self.elf().exports(symbol.as_bytes());
        let mut definitions: Vec<Symbol> =
            exports.filter(|found| found.kind == kind).copied().collect();
        definitions.dedup_by_key(|definition| definition.address);
        match definitions.as_slice() {
            &[definition] => Ok(definition),
            [] if kind == SymbolKind::Object => Err(self.missing("object", symbol)),
            [] => Err(self.missing("function", symbol)),
            several => Err(Error::SymbolAmbiguous {
                symbol: symbol.to_owned(),
                count: several.len(),
                executable: self.path().to_owned(),
            }),
        }
    }

    #[doc(hidden)]
    fn missing(&self, kind: &'static str, symbol: &str) -> Error {
        let (symbol, executable) = (symbol.to_owned(), self.path().to_owned());
        Error::SymbolMissing { kind, symbol, executable }
    }

    #[doc(hidden)]
    fn address_of(&self, symbol: &Symbol) -> usize {
        self.bias().wrapping_add(symbol.address as usize)
    }

    #[doc(hidden)]
    fn not_once(&self, table: &str, names: &[&str], failure: find::NotOnce) -> Error {
        let (table, executable) = (table.to_owned(), self.path().to_owned());
        if let (1, Some(member)) = (failure.places, failure.repeated) {
            return Error::TableMemberRepeated {
                table,
                executable,
                symbol: names[member].to_owned(),
            };
        }
        let count = |(name, count): (&&str, &usize)| format!("\"{name}\" {count} times");
        let occurrences: Vec<String> = names.iter().zip(&failure.occurrences).map(count).collect();
        Error::TableNotOnce {
            table,
            executable,
            places: failure.places,
            window: TABLE_WINDOW,
            occurrences: format!("found {}", occurrences.join(", ")),
        }
    }
}

impl Pointer {
    pub(crate) fn unexpected(self, expected: String) -> Error {
        Error::Unexpected { what: self.what, address: self.address, found: self.value, expected }
    }
}
