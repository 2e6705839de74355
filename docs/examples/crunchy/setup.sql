-- Keys, and all databases encrypted with their catalogs. PGO runs it once, after it has created the databases of the
-- manifest (here: hippo). It can be repeated: what is there stays as it is.
\set ON_ERROR_STOP on
CREATE EXTENSION IF NOT EXISTS pagevault;

DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pagevault.providers WHERE provider = 'vault') THEN
        PERFORM pagevault.add_provider('vault', 'vault', '{
            "address": "https://vault.example.com:8200",
            "ca_file": "/etc/postgres/vault-ca.pem",
            "auth": {"kubernetes": {"role": "hippo", "jwt_file": "/etc/postgres/vault-token"}}}');
    END IF;
    IF NOT EXISTS (SELECT FROM pagevault.database_keys WHERE scope = 'cluster') THEN
        PERFORM pagevault.set_cluster_master_key('vault', 'hippo');
    END IF;
END
$$;

SELECT count(*) FROM pagevault.encrypt_database();
SELECT count(*) FROM pagevault.encrypt_catalogs();

\connect template1
CREATE EXTENSION IF NOT EXISTS pagevault;
SELECT count(*) FROM pagevault.encrypt_database();
SELECT count(*) FROM pagevault.encrypt_catalogs();

\connect hippo
CREATE EXTENSION IF NOT EXISTS pagevault;
SELECT count(*) FROM pagevault.encrypt_database();
SELECT count(*) FROM pagevault.encrypt_catalogs();
