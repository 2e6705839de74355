-- The role that manages providers and keys and may remove encryption. Roles belong to the cluster, so
-- a second database finds it there.
DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_catalog.pg_roles WHERE rolname = 'pagevault_admin') THEN
        CREATE ROLE pagevault_admin NOLOGIN;
    END IF;
END
$$;
