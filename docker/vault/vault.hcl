# Vault or OpenBao of the demonstration. `setup` turns on Vault's audit log; that of OpenBao is in openbao.hcl.
storage "raft" {
  path    = "/vault/data"
  node_id = "one"
}

listener "tcp" {
  address       = "0.0.0.0:8200"
  tls_cert_file = "/vault/tls/vault.pem"
  tls_key_file  = "/vault/tls/vault.key"
}

api_addr      = "https://vault:8200"
cluster_addr  = "https://vault:8201"
disable_mlock = true
