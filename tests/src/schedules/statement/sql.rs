//! Statements as SQL.

use super::{Asked, Context, Statement};
use crate::schedules::database::{Database, Label, SCHEMAS, Table};

const COLUMNS: &str = "id bigint, n bigint, mark text, wide text, part int";

/// `SECURITY LABEL` if that was asked, or nothing.
fn labelled(asked: Asked, keyword: &str, table: u8, context: &Context) -> String {
    match asked {
        Asked::ByLabel => {
            let label = context.label_sql(table, Some(Label::Encrypted));
            format!("; SECURITY LABEL FOR pagevault ON {keyword} t{table} IS {label}")
        }
        Asked::Not | Asked::BySetting => String::new(),
    }
}

fn under_setting(asked: Asked, statements: String) -> String {
    match asked {
        Asked::BySetting => format!(
            "SET pagevault.default_encryption = on; {statements}; RESET pagevault.default_encryption"
        ),
        Asked::Not | Asked::ByLabel => statements,
    }
}

impl Statement {
    /// As the session sends it, in one message.
    pub(in crate::schedules) fn sql(&self, database: &Database, context: &Context) -> String {
        let table_of = |number: &u8| database.tables.get(number);
        let schema_of = |schema: &u8| SCHEMAS[usize::from(*schema)];
        match self {
            Statement::Create { table, asked, schema, unlogged } => {
                let unlogged = if *unlogged { "UNLOGGED " } else { "" };
                let schema = schema_of(schema);
                let create = format!(
                    "CREATE {unlogged}TABLE {schema}.t{table} ({COLUMNS} DEFAULT {table}, PRIMARY KEY (id)); \
                     ALTER TABLE t{table} ALTER wide SET STORAGE EXTERNAL{}",
                    labelled(*asked, "TABLE", *table, context)
                );
                under_setting(*asked, create)
            }
            Statement::CreatePartitioned { table, asked, schema } => format!(
                "CREATE TABLE {}.t{table} ({COLUMNS}) PARTITION BY LIST (part){}",
                schema_of(schema),
                labelled(*asked, "TABLE", *table, context)
            ),
            Statement::CreatePartition { table, of, asked } => {
                let schema = table_of(of).map_or(0, |of| of.schema);
                let create = format!(
                    "CREATE TABLE {}.t{table} PARTITION OF t{of} (part DEFAULT {table}) FOR VALUES IN ({table}); \
                     ALTER TABLE t{table} ADD PRIMARY KEY (id), ALTER wide SET STORAGE EXTERNAL{}",
                    SCHEMAS[schema],
                    labelled(*asked, "TABLE", *table, context)
                );
                under_setting(*asked, create)
            }
            Statement::CreateAs { table, of, asked, schema } => {
                let create = format!(
                    "CREATE TABLE {}.t{table} AS SELECT id, n, mark, wide, {table} AS part FROM t{of}; \
                     ALTER TABLE t{table} ADD PRIMARY KEY (id), ALTER part SET DEFAULT {table}{}",
                    schema_of(schema),
                    labelled(*asked, "TABLE", *table, context)
                );
                under_setting(*asked, create)
            }
            Statement::CreateView { table, of, asked, schema } => {
                let create = format!(
                    "CREATE MATERIALIZED VIEW {}.t{table} AS SELECT id, n, mark, wide FROM t{of}; \
                     CREATE UNIQUE INDEX t{table}_pkey ON t{table} (id){}",
                    schema_of(schema),
                    labelled(*asked, "MATERIALIZED VIEW", *table, context)
                );
                under_setting(*asked, create)
            }
            Statement::Refresh { table, concurrently } => {
                let concurrently = if *concurrently { "CONCURRENTLY " } else { "" };
                format!("REFRESH MATERIALIZED VIEW {concurrently}t{table}")
            }
            Statement::Attach { table, to } => {
                format!("ALTER TABLE t{to} ATTACH PARTITION t{table} FOR VALUES IN ({table})")
            }
            Statement::Detach { table } => {
                let parent = table_of(table).and_then(|table| table.parent).unwrap_or_default();
                format!("ALTER TABLE t{parent} DETACH PARTITION t{table}")
            }
            Statement::Drop { table } => {
                let keyword = table_of(table).map_or("TABLE", Table::keyword);
                format!("DROP {keyword} t{table}")
            }
            Statement::Change { table, change } => {
                let keyword = table_of(table).map_or("TABLE", Table::keyword);
                change.sql(keyword).replace("{t}", &format!("t{table}"))
            }
            Statement::Insert { table, rows } => {
                let marker = table_of(table).map_or("", Table::marker);
                let Context { first, .. } = context;
                format!(
                    "INSERT INTO t{table} SELECT i, i % 97, '{marker}-' || i, \
                     CASE WHEN i % 10 = 0 THEN repeat('{marker}', 150) END \
                     FROM generate_series({first}, {}) i",
                    first + i64::from(*rows) - 1
                )
            }
            Statement::Update { table, of_three } => {
                format!("UPDATE t{table} SET n = n + 1000 WHERE id % 3 = {of_three}")
            }
            Statement::Delete { table, of_five } => {
                format!("DELETE FROM t{table} WHERE id % 5 = {of_five}")
            }
            Statement::Sort { table } => format!(
                "SET work_mem = '64kB'; \
                 CREATE TEMPORARY TABLE sorted AS SELECT mark, wide FROM t{table} ORDER BY wide, mark DESC; \
                 SELECT count(*) FROM sorted; DROP TABLE sorted; RESET work_mem"
            ),
            Statement::LargeObject { object } => format!(
                "SELECT lo_from_bytea({}, convert_to(repeat('object {object} ', 1000), 'UTF8'))",
                Statement::oid(*object)
            ),
            Statement::Label { table, label } => {
                let keyword = table_of(table).map_or("TABLE", Table::keyword);
                let label = context.label_sql(*table, *label);
                format!("SECURITY LABEL FOR pagevault ON {keyword} t{table} IS {label}")
            }
            Statement::RotateDataKey { table } => {
                format!("SELECT pagevault.rotate_data_key('t{table}')")
            }
            Statement::RewriteCatalog { catalog } => format!("VACUUM FULL {}", catalog.name()),
            Statement::Shred { table } => {
                let schema = SCHEMAS[table_of(table).map_or(0, |table| table.schema)];
                format!("SELECT * FROM pagevault.shred('t{table}', '{schema}.t{table}')")
            }
        }
    }
}
