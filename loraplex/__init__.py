"""What clients and both services share; light, never torch or SQL.

client, channel, address, tenants   calling an engine or a registry
status                errors ⇄ gRPC statuses; exit_codes and printing: the same for commands
adapter_format/       PEFT folder → checked specification, manifest, digest
base_model, base_folder   a base model's config, shapes and weights digest
blobs                 stores of blobs by their SHA-256: file_blobs, s3_blobs; blob_content, s3
engine/, registry/, common/   generated stubs of protos/
"""
