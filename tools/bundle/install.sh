#!/bin/sh
# Installs DLion at one site from the bundle beside this file, without network: sh install.sh --help
#
# POSIX sh with sed, grep, tar and coreutils (or busybox), for nodes with few programs. Exit codes are
# those of the command line: docs/errors-and-exit-codes.md.
set -eu
export LC_ALL=C

USAGE=2 DATA=66 UNAVAILABLE=69 STORAGE=74

usage() {
  cat <<'END'
Installs DLion at one site from this bundle, without network.

  sh install.sh --images-only                             first on each other node, as root
  sh install.sh --site NAME [OPTIONS] [-- HELM ARGUMENTS]  then on a node with helm and kubectl, as root
  sh install.sh --site NAME --registry HOST/PATH          or instead once, from any machine with helm

Examples:
  sudo sh install.sh --site plant-a
  sudo sh install.sh --site plant-a -- -f plant-a.yaml --set keeper.size=10Gi
  sh install.sh --site plant-a --registry registry.plant-a.example:5000/dlion
  sh install.sh --site plant-a --dry-run

It verifies checksums.txt, brings the images to this node's containerd (or to a registry), then runs
`helm upgrade --install` and waits for the operator. Run again, it changes only what differs. Give the same
HELM ARGUMENTS each time: values that are left out return to the chart's.

Options:
  --site NAME           name of this site, as in spec.sites[].name of the manifests
  --images-only         bring the images only; needs neither helm nor kubectl
  --skip-images         install the chart only; all nodes have the images already
  --registry HOST/PATH  push the images there with skopeo, crane or podman, and have nodes pull them
  --insecure-registry   without TLS, or without verifying it
  --namespace NAME      namespace of the operator (dlion-system)
  --release NAME        name of the Helm release (dlion)
  --kubeconfig FILE, --context NAME  as for kubectl
  --timeout SECONDS     for the operator to be ready (300)
  --dry-run             verify and print what would be done; change nothing
  --help                this text
END
}

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
site='' namespace=dlion-system release=dlion registry='' kubeconfig='' context='' timeout=300
images=node chart=yes dry_run='' insecure='' work='' done_so_far='' started='' begun='' repair=''

say() { printf '%s\n' "$*"; }
fail() { # code, message: ends with both
  code=$1 && shift
  printf 'install.sh: %s\n' "$*" >&2
  exit "$code"
}

usage_error() { fail "$USAGE" "$* (sh install.sh --help)"; }

at_end() {
  code=$?
  trap - EXIT HUP INT TERM
  if [ -n "$work" ]; then rm -rf "$work"; fi
  if [ "$code" -ne 0 ] && [ -n "$done_so_far" ]; then
    [ -z "$begun" ] || find_repair
    printf 'install.sh: NOT complete. Done so far:%s\n%sThe same command continues from here.\n' "$done_so_far" \
      "${repair:+"First, once no helm runs: $repair
"}" >&2
  elif [ "$code" -ne 0 ] && [ -n "$started" ]; then
    say 'install.sh: nothing was changed.' >&2
  fi
  exit "$code"
}
trap at_end EXIT; trap 'exit 130' HUP INT TERM

find_repair() { # sets state, and repair: the command for a release whose helm was interrupted
  state=$(run_helm status "$release" --namespace "$namespace" 2>/dev/null | sed -n 's/^STATUS: \(pending-.*\)/\1/p')
  case $state in '') verb='' ;; pending-install) verb=uninstall ;; *) verb=rollback ;; esac # no earlier revision
  repair="${verb:+helm $verb $release --namespace $namespace${kubeconfig:+ --kubeconfig $kubeconfig}${context:+ --kube-context $context}}"
}

is_name() { # text, maximum length: whether it is a name of Kubernetes
  [ "${#1}" -le "$2" ] || return 1
  case $1 in '' | -* | *- | *[!a-z0-9-]*) return 1 ;; esac
}

while [ $# -gt 0 ]; do
  case $1 in
    --help | -h) usage && exit ;;
    --images-only) chart='' ; shift ;;
    --skip-images) images=skip; shift ;;
    --insecure-registry) insecure=yes; shift ;;
    --dry-run) dry_run=yes; shift ;;
    --) shift; break ;;
    --site=* | --registry=* | --namespace=* | --release=* | --kubeconfig=* | --context=* | --timeout=*)
      name=${1%%=*} value=${1#*=}
      shift && set -- "$name" "$value" "$@" ;;
    --site | --registry | --namespace | --release | --kubeconfig | --context | --timeout)
      [ $# -ge 2 ] || usage_error "$1 needs a value"
      case $2 in '' | -*) usage_error "$1 needs a value, not '$2'" ;; esac
      eval "${1#--}=\$2" # one of the names of this branch
      shift 2 ;;
    *) usage_error "unknown argument '$1'; arguments for helm stand after --" ;;
  esac
done

check_arguments() {
  if [ -n "$chart" ]; then
    [ -n "$site" ] || usage_error '--site is missing'
    is_name "$site" 40 || usage_error "--site '$site': at most 40 of a-z, 0-9 and -, as in spec.sites[].name"
  else
    [ "$images" != skip ] || usage_error '--images-only and --skip-images exclude each other'
    [ $# -eq 0 ] || usage_error "--images-only runs no helm: leave out '$1'"
  fi
  is_name "$namespace" 63 || usage_error "--namespace '$namespace': at most 63 of a-z, 0-9 and -"
  is_name "$release" 40 || usage_error "--release '$release': at most 40 of a-z, 0-9 and -"
  case $timeout in *[!0-9]* | 0* | ??????*) usage_error "--timeout '$timeout': seconds, 1 to 99999" ;; esac
  [ -z "$kubeconfig" ] || [ -r "$kubeconfig" ] || usage_error "--kubeconfig '$kubeconfig': no readable file"
  case $registry in
    *://*) usage_error "--registry '$registry': HOST/PATH without ${registry%%://*}://" ;;
    *[!A-Za-z0-9._:/-]* | /* | *//* | *:*/*:* | *@*) usage_error "--registry '$registry': HOST[:PORT]/PATH" ;;
  esac
  registry=${registry%/}
  [ "${#registry}" -le 200 ] || usage_error '--registry has more than 200 characters'
  [ -n "$registry" ] || [ -z "$insecure" ] || usage_error '--insecure-registry needs --registry'
  if [ -n "$registry" ] && [ "$images" = node ]; then images=registry; fi
  # Standard input has the values of this script.
  before=''
  for argument in "$@"; do
    case $before$argument in
      -f- | -f=- | --values- | --values=-) usage_error 'values from standard input: give them in a file' ;;
      -n* | --dry-run* | --namespace* | --kubeconfig* | --kube-context*)
        usage_error "'$argument' stands before --; --context is its name for kubectl and helm" ;;
    esac
    before=''
    case $argument in -f | --values) before=$argument ;; esac
  done
}

value_of() { sed -n "s/^$1: //p" "$here/bundle.yaml"; }

again='extract the archive again (tar xf), or copy it again if its sha256 differs from the published one'

verify_bundle() {
  list=$here/checksums.txt
  [ -s "$list" ] || fail "$DATA" "no checksums.txt in $here: the bundle is not complete; $again"
  if grep -qv '^[0-9a-f]\{64\}  [A-Za-z0-9][A-Za-z0-9._/+-]*$' "$list"; then
    fail "$DATA" "checksums.txt in $here is damaged; $again"
  fi
  for name in README.md bundle.yaml crds/dlionjob.yaml images/operator.tar images/sidecar.tar images/worker.tar \
    install.sh sbom/operator.cdx.json; do
    grep -q "^.\{66\}$name\$" "$list" || fail "$DATA" "checksums.txt in $here lacks $name: it is cut off; $again"
  done
  say 'Verifying checksums ...'
  if ! output=$(cd "$here" && sha256sum -c checksums.txt 2>&1); then
    printf '%s\n' "$output" | grep -v ': OK$' >&2 || true
    fail "$DATA" "the bundle in $here is not complete, or changed; $again"
  fi
  version=$(value_of version)
  platform=$(value_of platform)
  grep -q "^.\{66\}charts/dlion-$version\.tgz\$" "$list" || fail "$DATA" "no chart of version $version; $again"
  bundle_id=$(sha256sum "$list")
  bundle_id=${bundle_id%% *}
}

require_program() { # program, how to continue
  command -v "$1" >/dev/null 2>&1 || fail "$UNAVAILABLE" "no $1 on the PATH: $2"
}

# shellcheck disable=SC2086  # each option, if any
run_helm() { helm "$@" ${kubeconfig:+--kubeconfig "$kubeconfig"} ${context:+--kube-context "$context"}; }
# shellcheck disable=SC2086
run_kubectl() { kubectl "$@" ${kubeconfig:+--kubeconfig "$kubeconfig"} ${context:+--context "$context"}; }

check_cluster() {
  require_program helm 'copy the program of Helm 3 (one file) to this machine, or run the script where it is'
  require_program kubectl 'copy the program (one file) to this machine; on k3s, RKE2 or MicroK8s link it'
  # k3s and RKE2 write it here, and their users often set nothing.
  for file in /etc/rancher/k3s/k3s.yaml /etc/rancher/rke2/rke2.yaml; do
    if [ -z "$kubeconfig${KUBECONFIG:-}" ] && [ ! -e "${HOME:-/root}/.kube/config" ] && [ -r "$file" ]; then
      kubeconfig=$file
    fi
  done
  if ! output=$(run_kubectl get --raw /version --request-timeout=20s 2>&1); then
    fail "$UNAVAILABLE" "the cluster does not answer: $output
Set KUBECONFIG, --kubeconfig or --context."
  fi
  show='{range .items[*]}{.status.nodeInfo.architecture}/{.metadata.name} {end}'
  nodes=$(run_kubectl get nodes -o "jsonpath=$show" 2>/dev/null) || nodes='' # not everyone may list them
  others='' alike=''
  for node in $nodes; do
    if [ "linux/${node%%/*}" = "$platform" ]; then alike=yes; else others="$others ${node#*/}"; fi
  done
  [ -z "$nodes" ] || [ -n "$alike" ] \
    || fail "$DATA" "this bundle is for $platform, and no node of the cluster is; take the bundle of its architecture"
  [ -z "$others" ] || say "Note: these nodes are not $platform and cannot run DLion from this bundle:$others"
  find_repair # before the images: otherwise helm refuses the chart
  [ -z "$repair" ] || fail "$UNAVAILABLE" "release $release in namespace $namespace is $state: a helm was broken off, or runs
now. Once none runs: $repair, and then the same command again"
}

note_nodes_without_images() {
  show='{range .items[*]}{.metadata.name}{": "}{.status.images[*].names}{"\n"}{end}'
  nodes=$(run_kubectl get nodes -o "jsonpath=$show" 2>/dev/null) || nodes=''
  lacking=$(printf '%s' "$nodes" | grep -v "localhost/dlion-operator:$version\"" | sed 's/: .*//' \
    | grep -vxF "$(uname -n)") || lacking=''
  [ -z "$lacking" ] || say "Note: kubelet has not reported the images of these nodes (it takes it some seconds). Bring them
to all nodes that run pods of DLion: sh install.sh --images-only
$lacking"
}

find_containerd() { # sets ctr, and store: its folder of images
  tried=''
  rke2=/var/lib/rancher/rke2
  for candidate in '/var/lib/rancher/k3s/agent k3s ctr' '/var/snap/microk8s/common/var/lib microk8s ctr' \
    "$rke2/agent $rke2/bin/ctr --address /run/k3s/containerd/containerd.sock" '/var/lib ctr'; do
    store=${candidate%% *}/containerd
    ctr=${candidate#* }
    command -v "${ctr%% *}" >/dev/null 2>&1 || continue
    output=$($ctr version 2>&1) && return
    tried="$tried
  $ctr version: $output"
  done
  [ -z "$tried" ] || fail "$UNAVAILABLE" "no containerd answers here (run this as root, with sudo):$tried"
  fail "$UNAVAILABLE" "no containerd here (no k3s, RKE2, MicroK8s or ctr): run this on a node, or give --registry
for a private registry, or --skip-images if all nodes have the images"
}

has_image() { # target: whether containerd has exactly this image
  reference=$(value_of "$1.reference")
  $ctr --namespace k8s.io images ls "name==$reference" 2>/dev/null | grep -q " $(value_of "$1.digest") "
}

bytes_of() { printf '%d' "$(wc -c <"$1")"; }

free_bytes() { # folder; prints nothing if unknown
  kilobytes=$(df -Pk "$1" 2>/dev/null | sed -n '2s/.* \([0-9][0-9]*\)  *[0-9][0-9]*% .*/\1/p')
  [ -z "$kilobytes" ] || printf '%d' $((kilobytes * 1024))
}

require_space() { # folder, bytes, for what
  free=$(free_bytes "$1")
  [ -z "$free" ] || [ "$free" -ge "$2" ] \
    || fail "$STORAGE" "$1 has $((free / 1000000)) MB free; $3 needs $(($2 / 1000000)) MB: free space there"
}

# Targets that containerd does not have.
missing_images() { for target in operator sidecar worker; do has_image "$target" || printf '%s ' "$target"; done; }

import_images() {
  machine=$(uname -m)
  case $machine in x86_64 | amd64) own=linux/amd64 ;; aarch64 | arm64) own=linux/arm64 ;; *) own=$machine ;; esac
  [ "$own" = "$platform" ] || fail "$DATA" "this bundle is for $platform, and this node is $own ($machine): take the bundle
of its architecture, or --skip-images if this is no node that runs DLion"
  find_containerd
  wanted=$(missing_images)
  [ -n "$wanted" ] || say "This node has the images already ($ctr)."
  needed=0
  for target in $wanted; do
    needed=$((needed + $(bytes_of "$here/images/$target.tar") + $(value_of "$target.unpackedBytes")))
  done
  [ ! -d "$store" ] || require_space "$store" $((needed + needed / 20)) 'importing the images'
  for target in $wanted; do
    if [ -n "$dry_run" ]; then
      say "Would run: $ctr --namespace k8s.io images import $here/images/$target.tar"
      continue
    fi
    say "Importing $(value_of "$target.reference") ($ctr) ..."
    done_so_far="$done_so_far
  image $target: the import was begun on this node"
    if ! output=$($ctr --namespace k8s.io images import "$here/images/$target.tar" 2>&1); then
      case $output in
        *'no space left'*) fail "$STORAGE" "the disk is full: $output" ;;
        *'permission denied'*) fail "$UNAVAILABLE" "run this as root, with sudo: $output" ;;
      esac
      fail "$UNAVAILABLE" "$ctr could not import images/$target.tar: $output"
    fi
    reference=$(value_of "$target.reference")
    $ctr --namespace k8s.io images ls "name==$reference" | grep -q "^$reference " \
      || fail "$UNAVAILABLE" "$ctr imported images/$target.tar, and does not list $reference: $output"
    done_so_far="${done_so_far% the import was begun on this node} imported on this node"
  done
  [ -z "$dry_run" ] || return 0
  # Also of an earlier interrupted run. Otherwise kubelet deletes them when the disk fills, and cannot pull them again.
  for target in operator sidecar worker; do
    $ctr --namespace k8s.io images label "$(value_of "$target.reference")" io.cri-containerd.pinned=pinned >/dev/null 2>&1 \
      || say "Note: $target could not be pinned; kubelet may delete it when the disk fills."
  done
}

find_pusher() {
  for pusher in skopeo crane podman; do
    command -v "$pusher" >/dev/null 2>&1 && return
  done
  fail "$UNAVAILABLE" "no skopeo, crane or podman on the PATH to push with: install one of them (crane is one file), or leave
--registry out and run this on each node"
}

push_one() { # target, reference; in the folder of the images, as a path may have any letters
  cd "$here/images"
  case $pusher in
    skopeo) # Checksums are verified, so that it needs no policy of signatures.
      skopeo --insecure-policy copy ${insecure:+--dest-tls-verify=false} "oci-archive:$1.tar" "docker://$2" ;;
    crane)
      mkdir "$work/$1" && tar -xf "$1.tar" -C "$work/$1" \
        && crane push ${insecure:+--insecure} "$work/$1" "$2" && rm -rf "${work:?}/$1" ;;
    podman)
      podman load --quiet --input "$1.tar" && podman tag "$(value_of "$1.reference")" "$2" \
        && podman push ${insecure:+--tls-verify=false} "$2" ;;
  esac
}

push_images() {
  find_pusher
  work=$(mktemp -d)
  [ "$pusher" != crane ] \
    || require_space "$work" "$(bytes_of "$here/images/worker.tar")" 'unpacking an image (set TMPDIR for another folder)'
  for target in operator sidecar worker; do
    reference=$registry/dlion-$target:$version
    if [ -n "$dry_run" ]; then
      say "Would push: images/$target.tar to $reference ($pusher)"
      continue
    fi
    say "Pushing $reference ($pusher) ..."
    if ! output=$(push_one "$target" "$reference" 2>&1); then
      fail "$UNAVAILABLE" "$pusher could not push $reference: $output
Log in with '$pusher login' (crane auth login); for a registry without TLS give --insecure-registry."
    fi
    done_so_far="$done_so_far
  image $target: pushed to $registry"
  done
}

chart_values() {
  # The names in bundle.yaml; they cannot be pulled.
  names='registry: localhost, pullPolicy: Never'
  [ -z "$registry" ] || names="registry: \"$registry\""
  say "site: {name: \"$site\"}"
  say "images: {$names}"
  # Restarts the operator if the bundle is a different one of the same version.
  say "operator: {podAnnotations: {dlion.dev/bundle: \"$bundle_id\"}}"
}

install_chart() { # helm's arguments
  set -- upgrade --install "$release" "$here/charts/dlion-$version.tgz" --namespace "$namespace" --create-namespace \
    --wait --timeout "${timeout}s" --values - "$@"
  if [ -n "$dry_run" ]; then
    say "Would run: helm $* <<END
$(chart_values)
END"
    output=$(chart_values | run_helm "$@" --dry-run 2>&1) || fail "$UNAVAILABLE" "helm refuses it: $output"
    return
  fi
  [ -n "$registry" ] || note_nodes_without_images
  say "Installing release $release in namespace $namespace ..."
  begun=yes done_so_far="$done_so_far
  release $release in namespace $namespace: begun (helm status -n $namespace $release)"
  if ! output=$(chart_values | run_helm "$@" 2>&1); then
    pods=$(run_kubectl -n "$namespace" get pods -o wide --request-timeout=20s 2>&1) || true
    printf '%s\n' "$pods" >&2
    case $output$pods in
      *ErrImageNeverPull*) advice="A node of these pods has no images: run there sh install.sh --images-only" ;;
      *'invalid ownership metadata'*) advice="The definition of DLionJob or DLionRuntime belongs to another installation: add -- --take-ownership, or
-- --set crds.enabled=false and: kubectl apply --server-side -f $here/crds" ;;
      *) advice="Look at: kubectl -n $namespace describe pods; remove with: helm uninstall -n $namespace $release" ;;
    esac
    fail "$UNAVAILABLE" "helm could not install the chart: $output
$advice"
  fi
  if ! output=$(run_kubectl -n "$namespace" rollout status deployment --timeout="${timeout}s" \
    -l "app.kubernetes.io/instance=$release,app.kubernetes.io/component=operator" 2>&1); then
    fail "$UNAVAILABLE" "the operator is not ready: $output
Look at: kubectl -n $namespace describe pods; kubectl -n $namespace logs -l app.kubernetes.io/component=operator"
  fi
}

print_next() {
  say
  say "DLion $version runs as site $site."
  [ -n "$registry" ] || say 'Each other node needs the images, too:  sh install.sh --images-only'
  cat <<END
Test it:       helm test -n $namespace $release
The commands:  python3.11 -m venv dlion; dlion/bin/pip install --no-index --find-links "$here/wheels" 'dlion[cluster]'
Other sites:   dlion trust show -n $namespace   (what they have to trust)
A first job:   dlion init first; name only $site in its spec.sites; dlion submit first/job.yaml --wait
END
}

check_arguments "$@"
started=yes
verify_bundle
say "DLion $version for $platform, in $here"
[ "$(value_of builder)" != testbed ] || say 'Note: this bundle is for tests: its images hold settings of the machine that built them.'
[ -z "$chart" ] || check_cluster
case $images in node) import_images ;; registry) push_images ;; esac
[ -z "$chart" ] || install_chart "$@"
if [ -n "$dry_run" ]; then
  say 'Nothing was changed (--dry-run).'
elif [ -n "$chart" ]; then
  print_next
else
  say "The images of DLion $version are in ${registry:-the containerd of this node}."
fi
