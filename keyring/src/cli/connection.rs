//! Options of the commands that ask a running server.

use clap::Args;

use crate::failure::Failure;
use crate::server::Psql;

#[derive(Args)]
pub(super) struct Connection {
    /// How to connect, as for psql: a database, or a connection string such as
    /// "host=/run/postgresql user=postgres". By default what PGHOST, PGUSER and so on say
    #[arg(short, long, value_name = "CONNINFO")]
    dbname: Option<String>,
}

impl Connection {
    pub(super) fn psql(&self) -> Result<Psql, Failure> {
        Psql::new(self.dbname.clone())
    }
}
