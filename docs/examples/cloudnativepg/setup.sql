-- Keys, and the database postgres encrypted with its catalogs. It can be repeated: what
-- is there stays as it is. Settings are in the manifest of the cluster.
CREATE EXTENSION IF NOT EXISTS pagevault;

DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pagevault.providers WHERE provider = 'vault') THEN
        PERFORM pagevault.add_provider('vault', 'vault', '{
            "address": "https://vault.example.com:8200",
            "ca_file": "/projected/vault-ca.pem",
            "auth": {"kubernetes": {"role": "db", "jwt_file": "/projected/vault-token"}}}');
    END IF;
    IF NOT EXISTS (SELECT FROM pagevault.database_keys WHERE scope = 'cluster') THEN
        PERFORM pagevault.set_cluster_master_key('vault', 'db-kek');
    END IF;
END
$$;

SELECT count(*) FROM pagevault.encrypt_database();
SELECT count(*) FROM pagevault.encrypt_catalogs();
