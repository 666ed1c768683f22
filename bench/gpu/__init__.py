"""What `make gpu` and `make gpu-peers` run on a CUDA machine: the plan, its jobs, what each of them asks."""
