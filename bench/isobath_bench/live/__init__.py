"""Jobs and snapshots of disks in use: servers are told over QMP what to do, while fio is their guest."""
