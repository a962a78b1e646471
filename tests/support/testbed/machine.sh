#!/bin/sh
# Starts a machine: mounts its own /proc, /run, /var/lib and /var/log, then runs `pause`.
# Runs in new process and mount namespaces (see machines.py). Arguments: the machine's folder, pause.
set -eu
# Volumes that one process of the machine mounts must be visible to all others.
mount --make-rshared /
mount -t proc proc /proc
mount -t tmpfs -o mode=755,size=256m tmpfs /run
mkdir -p /run/netns
mount --bind "$1/lib" /var/lib
mount --bind "$1/log" /var/log
# The kubelet would set these for the whole kernel, which others use too; here they are set already.
mkdir /run/sysctl
while read -r name value; do
  [ -e "/proc/sys/$name" ] || continue
  file="/run/sysctl/$(echo "$name" | tr / -)"
  echo "$value" >"$file"
  mount --bind "$file" "/proc/sys/$name"
done <<KERNEL
vm/overcommit_memory 1
vm/panic_on_oom 0
kernel/panic 10
kernel/panic_on_oops 1
kernel/keys/root_maxkeys 1000000
kernel/keys/root_maxbytes 25000000
KERNEL
exec "$2"
