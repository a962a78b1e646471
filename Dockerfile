# DLion's images: operator, worker, sidecar (docs/images.md).
#
#   docker build --target operator -t dlion-operator .
#
# Every package comes from requirements.lock, its hash checked. Stages are ordered by how
# often they change: a change of sources rebuilds one layer of a few megabytes.
# TENSORFLOW=gpu builds a worker that computes on NVIDIA's GPUs (x86-64).
# BASE is the base image of all stages; a release names it by digest (NAME@sha256:...), and gives
# BASE_DIGEST for the label, as `make bundle` does.

ARG BASE=docker.io/library/debian:bookworm-slim
FROM ${BASE} AS python
RUN apt-get update \
 && apt-get install --yes --no-install-recommends python3 \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/cache/ldconfig/* /var/log/* \
 && groupadd --gid 65532 dlion \
 && useradd --uid 65532 --gid 65532 --home-dir /tmp --no-create-home --shell /usr/sbin/nologin dlion \
 && install -d -o 65532 -g 65532 /run/dlion /var/lib/dlion
# No process writes next to the sources; libraries keep their caches in /tmp.
ENV PATH=/opt/dlion/bin:/usr/local/bin:/usr/bin:/bin \
    HOME=/tmp \
    XDG_CACHE_HOME=/tmp/.cache \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
WORKDIR /
LABEL org.opencontainers.image.title="DLion" \
      org.opencontainers.image.licenses="Apache-2.0"


# Installs packages; pip and uv stay in this stage.
FROM python AS installer
RUN apt-get update \
 && apt-get install --yes --no-install-recommends binutils ca-certificates python3-venv \
 && rm -rf /var/lib/apt/lists/*
COPY requirements-uv.lock /build/
RUN python3 -m venv /opt/uv \
 && /opt/uv/bin/pip install --no-cache-dir --require-hashes -r /build/requirements-uv.lock \
 && python3 -m venv --without-pip /opt/dlion
ENV UV_NO_CACHE=1 UV_LINK_MODE=copy UV_COMPILE_BYTECODE=1
COPY pyproject.toml requirements.lock requirements-gpu.lock tools/image_requirements.py /build/
WORKDIR /build


FROM installer AS operator-packages
RUN python3 image_requirements.py --extra operator --omit click --omit packaging --omit rich > operator.lock \
 && /opt/uv/bin/uv pip sync --python /opt/dlion/bin/python --require-hashes operator.lock


FROM installer AS sidecar-packages
RUN python3 image_requirements.py --extra sidecar --omit click --omit packaging --omit rich > sidecar.lock \
 && /opt/uv/bin/uv pip sync --python /opt/dlion/bin/python --require-hashes sidecar.lock \
 && find /opt/dlion/lib -type d -name tests -prune -exec rm -r {} +


# The stage above is mounted and installs packages in their final place: copying them would write
# these gigabytes twice. Certificates are for programs that fetch their data by https.
# Left out: libclang and TensorFlow's headers, which only compilers need; packages that draw reports
# (`dlion report` runs on the user's machine) and serve TensorBoard's pages; tests; debug symbols.
FROM python AS worker-packages
RUN apt-get update \
 && apt-get install --yes --no-install-recommends ca-certificates \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/cache/ldconfig/* /var/log/*
# Copied here too: not every builder notices a change of a mounted stage. They list the content.
COPY pyproject.toml requirements.lock requirements-gpu.lock tools/image_requirements.py /usr/share/dlion/
ARG TENSORFLOW=cpu
RUN --mount=type=bind,from=installer,source=/,target=/installer \
    set -- --extra worker --omit click --omit libclang --omit matplotlib \
      --omit tensorboard-data-server \
 && case "$TENSORFLOW" in \
      cpu) ;; \
      gpu) set -- "$@" --omit tensorflow-cpu --lock requirements.lock --lock requirements-gpu.lock ;; \
      *) echo "TENSORFLOW=$TENSORFLOW: allowed are cpu and gpu" >&2; exit 1 ;; \
    esac \
 && cd /usr/share/dlion && python3 image_requirements.py "$@" > /tmp/worker.lock \
 && python3 -m venv --without-pip /opt/dlion \
 && UV_NO_CACHE=1 UV_LINK_MODE=copy UV_COMPILE_BYTECODE=1 \
    /installer/opt/uv/bin/uv pip sync --python /opt/dlion/bin/python --require-hashes /tmp/worker.lock \
 && cd /opt/dlion/lib/python3.11/site-packages \
 && find . -type d -name tests -prune -exec rm -r {} + \
 && rm -r tensorflow/include /tmp/worker.lock \
 && export LD_LIBRARY_PATH="$(echo /installer/usr/lib/*-linux-gnu)" \
 && find tensorflow llvmlite -name '*.so*' -type f -exec /installer/usr/bin/strip --strip-unneeded {} +


# The codecs' loops as machine code for any processor of this architecture (NUMBA_CPU_NAME): compiling
# them in a pod takes as long as importing TensorFlow.
FROM worker-packages AS kernels
ENV NUMBA_CPU_NAME=generic NUMBA_CACHE_DIR=/opt/kernels
COPY api/dlion_api/ /opt/dlion/lib/python3.11/site-packages/dlion_api/
COPY worker/dlion_core/__init__.py worker/dlion_core/compiling.py worker/dlion_core/phase_clock.py /opt/dlion/lib/python3.11/site-packages/dlion_core/
COPY worker/dlion_core/codecs/ /opt/dlion/lib/python3.11/site-packages/dlion_core/codecs/
# Not all modules of the codecs are imported by the package.
RUN python -c 'import dlion_core.codecs, dlion_core.codecs.norms'


FROM python AS operator-sources
COPY api/dlion_api/ /sources/dlion_api/
COPY operator/dlion_operator/ /sources/dlion_operator/
RUN python3 -m compileall -q -j 0 --invalidation-mode unchecked-hash \
      -s /sources -p /opt/dlion/lib/python3.11/site-packages /sources


FROM python AS worker-sources
COPY api/dlion_api/ /sources/dlion_api/
COPY worker/dlion_core/ /sources/dlion_core/
# Contains the reader of manifests and environments in result folders, which bounds their expansion.
COPY worker/dlion_environments/ /sources/dlion_environments/
COPY worker/dlion_results/ /sources/dlion_results/
COPY worker/dlion_worker/ /sources/dlion_worker/
RUN python3 -m compileall -q -j 0 --invalidation-mode unchecked-hash \
      -s /sources -p /opt/dlion/lib/python3.11/site-packages /sources


FROM python AS operator
ARG BASE
LABEL org.opencontainers.image.base.name="${BASE}" \
      org.opencontainers.image.description="DLion's operator: runs DLionJobs of one site"
COPY --from=operator-packages /opt/dlion/ /opt/dlion/
COPY --from=operator-sources /sources/ /opt/dlion/lib/python3.11/site-packages/
# buildah 1.28 reuses a label's layer for other arguments, except after a RUN that names them.
ARG BASE_DIGEST=""
RUN : "${BASE_DIGEST}"
LABEL org.opencontainers.image.base.digest="${BASE_DIGEST}"
USER 65532:65532
ENTRYPOINT ["env", "--block-signal=TERM", "python", "-m", "dlion_operator"]
CMD ["--config", "/etc/dlion-operator/config.yaml"]


FROM python AS sidecar
ARG BASE
LABEL org.opencontainers.image.base.name="${BASE}" \
      org.opencontainers.image.description="DLion's sidecar: steers one worker, without TensorFlow"
COPY --from=sidecar-packages /opt/dlion/ /opt/dlion/
COPY --from=worker-sources /sources/ /opt/dlion/lib/python3.11/site-packages/
ARG BASE_DIGEST=""
RUN : "${BASE_DIGEST}"
LABEL org.opencontainers.image.base.digest="${BASE_DIGEST}"
USER 65532:65532
ENTRYPOINT ["env", "--block-signal=TERM", "python", "-m", "dlion_worker.pod"]
CMD ["sidecar"]


FROM worker-packages AS worker
ARG BASE
LABEL org.opencontainers.image.base.name="${BASE}" \
      org.opencontainers.image.description="DLion's worker: trains, and keeps a site's models"
ENV KERAS_HOME=/tmp/.keras \
    MPLCONFIGDIR=/tmp/.matplotlib \
    NUMBA_CPU_NAME=generic \
    NUMBA_CACHE_DIR=/tmp/.kernels \
    DLION_KERNELS=/opt/kernels
COPY --from=kernels /opt/kernels/ /opt/kernels/
COPY --from=worker-sources /sources/ /opt/dlion/lib/python3.11/site-packages/
ARG BASE_DIGEST=""
RUN : "${BASE_DIGEST}"
LABEL org.opencontainers.image.base.digest="${BASE_DIGEST}"
USER 65532:65532
ENTRYPOINT ["env", "--block-signal=TERM", "python", "-m", "dlion_worker.pod"]
CMD ["trainer"]
