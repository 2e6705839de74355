-- Keys, and the databases postgres and template1 encrypted with their catalogs: databases that are created later
-- are copies of template1. It is run after each promotion too: what is there stays as it is.
CREATE EXTENSION IF NOT EXISTS pagevault;

DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pagevault.providers WHERE provider = 'vault') THEN
        PERFORM pagevault.add_provider('vault', 'vault', '{
            "address": "https://vault.example.com:8200",
            "ca_file": "/etc/pagevault/vault-ca.pem",
            "auth": {"kubernetes": {"role": "db", "jwt_file": "/var/run/secrets/pagevault/token"}}}');
    END IF;
    IF NOT EXISTS (SELECT FROM pagevault.database_keys WHERE scope = 'cluster') THEN
        PERFORM pagevault.set_cluster_master_key('vault', 'db-kek');
    END IF;
END
$$;

SELECT count(*) FROM pagevault.encrypt_database();
SELECT count(*) FROM pagevault.encrypt_catalogs();

\connect -reuse-previous=on template1
CREATE EXTENSION IF NOT EXISTS pagevault;
SELECT count(*) FROM pagevault.encrypt_database();
SELECT count(*) FROM pagevault.encrypt_catalogs();
