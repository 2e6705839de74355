-- The databases that have encrypted files, as one JSON document; in a database whose extension is
-- trusted.
BEGIN TRANSACTION READ ONLY;
SET LOCAL search_path = pg_catalog, pg_temp;
SET LOCAL lock_timeout = '30s';
SELECT coalesce(jsonb_agg(to_jsonb(d) ORDER BY d.database), '[]') FROM pagevault.encrypted_databases d;
COMMIT;
