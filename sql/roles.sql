-- Checks before any object of the extension is created. This runs with the schema pagevault in its
-- search path, so until that schema is known to be clean, all names and operators are qualified.

-- The owner of the schema would own its contents, and the following statements could confuse
-- existing objects in it with PostgreSQL's own.
DO $$
DECLARE
    schema_owner pg_catalog.oid;
    problem pg_catalog.text;
BEGIN
    SELECT nspowner INTO schema_owner
      FROM pg_catalog.pg_namespace WHERE nspname OPERATOR(pg_catalog.=) 'pagevault'::pg_catalog.name;
    IF NOT (SELECT rolsuper FROM pg_catalog.pg_roles WHERE oid OPERATOR(pg_catalog.=) schema_owner) THEN
        problem := pg_catalog.format('belongs to %I', pg_catalog.pg_get_userbyid(schema_owner));
    ELSIF EXISTS (
        SELECT FROM pg_catalog.pg_depend
         WHERE refclassid OPERATOR(pg_catalog.=) 2615::pg_catalog.oid -- pg_namespace
           AND refobjid OPERATOR(pg_catalog.=)
               (SELECT oid FROM pg_catalog.pg_namespace WHERE nspname OPERATOR(pg_catalog.=) 'pagevault'::pg_catalog.name)
           AND classid OPERATOR(pg_catalog.<>) 3079::pg_catalog.oid) -- pg_extension
    THEN
        problem := 'is not empty';
    -- Users with CREATE could create objects while this runs, unless this command has just created
    -- the schema.
    ELSIF EXISTS (
        SELECT FROM pg_catalog.pg_namespace n, pg_catalog.aclexplode(n.nspacl) a
         WHERE n.nspname OPERATOR(pg_catalog.=) 'pagevault'::pg_catalog.name
           AND n.xmin OPERATOR(pg_catalog.<>) pg_catalog.pg_current_xact_id()::pg_catalog.xid
           AND a.privilege_type OPERATOR(pg_catalog.=) 'CREATE'
           AND a.grantee OPERATOR(pg_catalog.<>) n.nspowner)
    THEN
        problem := 'others may create objects in it';
    END IF;
    IF problem IS NOT NULL THEN
        RAISE EXCEPTION 'schema pagevault already exists and %', problem
            USING ERRCODE = 'object_not_in_prerequisite_state',
                  DETAIL = 'The extension creates this schema, and trusts the objects in it.',
                  HINT = 'Check its contents, then DROP SCHEMA pagevault CASCADE.';
    END IF;
END
$$;

-- The role that manages providers and keys and may remove encryption. Roles belong to the cluster,
-- so in a second database the role exists already. But creating it in advance must not give any
-- rights. From PostgreSQL 16 on, a user who creates a role without being superuser gets ADMIN on
-- it, without INHERIT and SET (CreateRole in user.c).
DO $$
DECLARE
    maker pg_catalog.name;
BEGIN
    IF NOT EXISTS (
        SELECT FROM pg_catalog.pg_roles WHERE rolname OPERATOR(pg_catalog.=) 'pagevault_admin'::pg_catalog.name)
    THEN
        CREATE ROLE pagevault_admin NOLOGIN;
    ELSIF pg_catalog.current_setting('server_version_num')::pg_catalog.int4 OPERATOR(pg_catalog.>=) 160000 THEN
        EXECUTE $query$
            SELECT u.rolname
              FROM pg_catalog.pg_auth_members m
              JOIN pg_catalog.pg_roles r ON r.oid OPERATOR(pg_catalog.=) m.roleid
              JOIN pg_catalog.pg_roles u ON u.oid OPERATOR(pg_catalog.=) m.member
             WHERE r.rolname OPERATOR(pg_catalog.=) 'pagevault_admin'::pg_catalog.name
               AND m.admin_option AND NOT m.inherit_option AND NOT m.set_option AND NOT u.rolsuper
             LIMIT 1
        $query$ INTO maker;
        IF maker IS NOT NULL THEN
            RAISE EXCEPTION 'role pagevault_admin already exists and was created by %', pg_catalog.quote_ident(maker)
                USING ERRCODE = 'object_not_in_prerequisite_state',
                      DETAIL = 'The creator can grant it, and its members may manage keys and remove encryption.',
                      HINT = 'Check its members, then DROP ROLE pagevault_admin.';
        END IF;
    END IF;
END
$$;
