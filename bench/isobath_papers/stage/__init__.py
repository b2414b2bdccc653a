"""What experiments are made on: slow disks, images served as files, file systems in them, programs with little
memory."""
