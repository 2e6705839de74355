-- Views, and all grants.

CREATE VIEW pagevault.status AS
    SELECT * FROM pagevault.status_row();
COMMENT ON VIEW pagevault.status IS 'state of pagevault in this server';

CREATE VIEW pagevault.providers AS
    SELECT * FROM pagevault.provider_rows();
COMMENT ON VIEW pagevault.providers IS 'key providers, their options, and how they answered when they were last asked';

CREATE VIEW pagevault.master_keys AS
    SELECT CASE WHEN k.scope IS NULL THEN 'cluster' ELSE 'database' END AS scope,
           d.datname AS database,
           k.provider, k.master_key, k.master_version, k.database_key_version, k.state, k.wrapped_at
      FROM pagevault.master_key_rows() k
      LEFT JOIN pg_catalog.pg_database d ON d.oid = k.scope;
COMMENT ON VIEW pagevault.master_keys IS 'database keys and the master keys that wrap them';

CREATE VIEW pagevault.data_keys AS
    SELECT pg_catalog.pg_filenode_relation(
               CASE WHEN k.tablespace = d.dattablespace THEN 0 ELSE k.tablespace END, k.filenode
           )::pg_catalog.regclass AS relation,
           k.filenode, k.epoch, k.cipher, k.is_current,
           CASE WHEN k.scope IS NULL THEN 'cluster' ELSE 'database' END AS wrapped_by,
           k.database_key_version
      FROM pagevault.data_key_rows() k
      JOIN pg_catalog.pg_database d ON d.datname = pg_catalog.current_database();
COMMENT ON VIEW pagevault.data_keys IS 'wrapped data keys of this database; relation is null for files that are gone';

CREATE VIEW pagevault.relations AS
    SELECT c.oid::pg_catalog.regclass AS relation,
           c.relkind AS kind,
           l.label,
           k.epoch IS NOT NULL AS encrypted,
           k.epoch, k.cipher,
           pg_catalog.pg_relation_size(c.oid) AS bytes
      FROM pg_catalog.pg_class c
      JOIN pg_catalog.pg_database d ON d.datname = pg_catalog.current_database()
      LEFT JOIN pg_catalog.pg_seclabel l
             ON l.objoid = c.oid AND l.classoid = 'pg_catalog.pg_class'::pg_catalog.regclass
            AND l.objsubid = 0 AND l.provider = 'pagevault'
      LEFT JOIN pagevault.data_key_rows() k
             ON k.filenode = pg_catalog.pg_relation_filenode(c.oid)
            AND k.tablespace = CASE WHEN c.reltablespace = 0 THEN d.dattablespace ELSE c.reltablespace END
            AND k.is_current
     WHERE c.relkind IN ('r', 'm', 'i', 't', 'S') AND c.relpersistence <> 't'
       AND (k.epoch IS NOT NULL OR c.oid >= 16384);
COMMENT ON VIEW pagevault.relations IS 'relations with storage, and under which key new pages are written';

CREATE VIEW pagevault.drift AS
    SELECT * FROM pagevault.drift(false);
COMMENT ON VIEW pagevault.drift IS 'relations that are not what labels and settings want, and what puts them right';

-- Nothing is anybody's, whatever default privileges said (ALTER DEFAULT PRIVILEGES), but for what follows.
DO $$
DECLARE
    command text;
BEGIN
    FOR command IN
        SELECT format('REVOKE ALL ON %s FROM %s CASCADE', o.what,
                      CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE a.grantee::regrole::text END)
          FROM (SELECT 'FUNCTION ' || oid::regprocedure AS what, proowner AS owner,
                       coalesce(proacl, acldefault('f', proowner)) AS acl
                  FROM pg_proc WHERE pronamespace = 'pagevault'::regnamespace
                UNION ALL
                SELECT 'TABLE ' || oid::regclass, relowner, relacl
                  FROM pg_class WHERE relnamespace = 'pagevault'::regnamespace
                UNION ALL
                SELECT 'SCHEMA ' || nspname, nspowner, nspacl
                  FROM pg_namespace WHERE nspname = 'pagevault') o,
               aclexplode(o.acl) a
         WHERE a.grantee <> o.owner
         GROUP BY o.what, a.grantee
    LOOP
        EXECUTE command;
    END LOOP;
END
$$;

-- PUBLIC: reading, and nothing of keys or providers.
GRANT USAGE ON SCHEMA pagevault TO PUBLIC;
GRANT SELECT ON pagevault.status, pagevault.data_keys, pagevault.relations TO PUBLIC;
GRANT EXECUTE ON FUNCTION
    pagevault.status_row(), pagevault.data_key_rows(), pagevault.is_encrypted(regclass)
    TO PUBLIC;

-- Who monitors: what differs from the policy, and what is on disk.
GRANT SELECT ON pagevault.drift TO pg_monitor, pagevault_admin;
GRANT EXECUTE ON FUNCTION pagevault.drift(boolean), pagevault.verify(regclass) TO pg_monitor, pagevault_admin;

-- Who manages keys. Those that change anything ask for the role once more.
GRANT SELECT ON pagevault.providers, pagevault.master_keys TO pagevault_admin;
GRANT EXECUTE ON FUNCTION
    pagevault.provider_rows(), pagevault.master_key_rows(),
    pagevault.add_provider(text, text, jsonb), pagevault.alter_provider(text, jsonb),
    pagevault.drop_provider(text), pagevault.check_provider(text, text),
    pagevault.set_master_key(text, text), pagevault.set_cluster_master_key(text, text),
    pagevault.rotate_master_key(), pagevault.rotate_cluster_master_key(),
    pagevault.rotate_database_key(), pagevault.rotate_wal_key(), pagevault.unlock()
    TO pagevault_admin;

-- It writes, so it is not PUBLIC's: owners have the statement SECURITY LABEL, or may be granted this.
GRANT EXECUTE ON FUNCTION pagevault.encrypt(regclass, text) TO pagevault_admin;
GRANT EXECUTE ON FUNCTION
    pagevault.decrypt(regclass), pagevault.encrypt_catalogs(),
    pagevault.encrypt_database(), pagevault.decrypt_database(),
    pagevault.reconcile(regclass), pagevault.rotate_data_key(regclass), pagevault.rotate_all_data_keys(),
    pagevault.rekey_pause(bigint), pagevault.rekey_resume(bigint), pagevault.rekey_cancel(bigint),
    pagevault.shred(regclass, text), pagevault.shred_schema(regnamespace, text), pagevault.shred_database(text, text),
    pagevault.shred_former_files(text)
    TO pagevault_admin;

-- Jobs are watched by who monitors, and waited for by owners (each asks whose relation it is).
GRANT SELECT ON pagevault.rekey_progress TO pg_monitor, pagevault_admin;
GRANT EXECUTE ON FUNCTION
    pagevault.rekey_wait(bigint, interval), pagevault.rekey_wait(integer, interval), pagevault.rekey_wait(regclass, interval)
    TO PUBLIC;
