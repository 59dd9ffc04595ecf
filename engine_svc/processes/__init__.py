"""The process tree of one engine, and the sockets between its parts.

supervisor          starts, watches and restarts the others; supervised and child are the two ends
                    of a life line; port, run_folder, metrics_server: what one engine holds
core_process        the model and the core under core_loop; loader_link is its way to the loader
frontend_process    links is its way to the core, names_feed to the loader
loader_process      registry and store on one side, core and frontends on the other
socket              channels, and outboxes that never block; threads: how torch's threads wait
"""
