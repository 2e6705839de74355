# Vault of the demonstration. `setup` turns on its audit log. OpenBao requires it here instead
# (audit "file" "file" { options { file_path = "/vault/log/audit.log" } }).
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
