# In addition to vault.hcl, if the image is OpenBao's: clients of its API may not choose which files the server
# writes.
audit "file" "file" {
  options {
    file_path = "/vault/log/audit.log"
  }
}
