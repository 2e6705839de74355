-- What must be so before anything of ours is made. This runs with the schema pagevault in its search path, so
-- until that schema is known to be clean every name and operator says where it is from.

-- Whoever owns the schema owns what is in it; and what somebody put there might be taken for PostgreSQL's own
-- by the statements that follow.
DO $$
DECLARE
    schema_owner pg_catalog.oid;
    trouble pg_catalog.text;
BEGIN
    SELECT nspowner INTO schema_owner
      FROM pg_catalog.pg_namespace WHERE nspname OPERATOR(pg_catalog.=) 'pagevault'::pg_catalog.name;
    IF NOT (SELECT rolsuper FROM pg_catalog.pg_roles WHERE oid OPERATOR(pg_catalog.=) schema_owner) THEN
        trouble := pg_catalog.format('belongs to %I', pg_catalog.pg_get_userbyid(schema_owner));
    ELSIF EXISTS (
        SELECT FROM pg_catalog.pg_depend
         WHERE refclassid OPERATOR(pg_catalog.=) 2615::pg_catalog.oid -- pg_namespace
           AND refobjid OPERATOR(pg_catalog.=)
               (SELECT oid FROM pg_catalog.pg_namespace WHERE nspname OPERATOR(pg_catalog.=) 'pagevault'::pg_catalog.name)
           AND classid OPERATOR(pg_catalog.<>) 3079::pg_catalog.oid) -- pg_extension
    THEN
        trouble := 'is not empty';
    END IF;
    IF trouble IS NOT NULL THEN
        RAISE EXCEPTION 'schema pagevault is there already and %', trouble
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  DETAIL = 'The extension makes this schema, and trusts what is in it.',
                  HINT = 'See what is in it, then DROP SCHEMA pagevault CASCADE.';
    END IF;
END
$$;

-- The role that manages providers and keys and may remove encryption. Roles belong to the cluster, so
-- a second database finds it there.
DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_catalog.pg_roles WHERE rolname = 'pagevault_admin') THEN
        CREATE ROLE pagevault_admin NOLOGIN;
    END IF;
END
$$;
