-- The database of the application, which is empty, with its catalogs. It can be repeated.
CREATE EXTENSION IF NOT EXISTS pagevault;
SELECT count(*) FROM pagevault.encrypt_database();
SELECT count(*) FROM pagevault.encrypt_catalogs();
