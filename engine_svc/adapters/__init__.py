"""Names and weights of adapters, on their way from registry and store to the core. No torch.

watch      the registry's events → replica → NameMapUpdate for every frontend
loader     want, drop, poll: who is fetched next, what failed, what may be evicted
fetch      disk cache, else manifest → download → check → pack
packer     checked tensors → the packed file of engine_svc/packed.py
disk_cache, host_region (spans, residency)    the two tiers that this process owns
folder_weights    the same for adapter folders, without registry and store
"""
