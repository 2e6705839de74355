# What a database server needs of Vault or OpenBao for the master key "db-kek" of the Transit engine
# mounted at "transit". Nothing here lets it make, delete, export or configure a key.

# Wrap. Only "update": with "create" a misspelt name would make a new key.
path "transit/encrypt/db-kek" {
  capabilities = ["update"]
}

# Unwrap, at start and to prove every change.
path "transit/decrypt/db-kek" {
  capabilities = ["update"]
}

# Wrap again under the newest version, without the plaintext leaving Vault.
path "transit/rewrap/db-kek" {
  capabilities = ["update"]
}

# See the newest version, and that the key binds what it wraps (derived=true).
path "transit/keys/db-kek" {
  capabilities = ["read"]
}

# pagevault.rotate_database_master_key() and rotate_cluster_master_key(). Leave it out if somebody else rotates
# the key in Vault (or auto_rotate_period does): the same functions then take up the new version.
path "transit/keys/db-kek/rotate" {
  capabilities = ["update"]
}
