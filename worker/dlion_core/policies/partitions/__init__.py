"""How replicas stay consistent through network partitions.

`quorum` pauses sides that are too small. `version_vector` records what each replica contains, and
`partition_merge` merges replicas that trained apart.
"""
