# Gemel on an x86 box: `gemel run /box/box.yaml`. Built from the root of the repository:
#     docker build -f docker/x86.Dockerfile -t gemel .
# What the image ships under, and how it is run: docs/running-a-box.md.
FROM debian:bookworm-slim AS built

# Read by pip: another index.
ARG PIP_INDEX_URL

SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# hadolint ignore=DL3008  # Debian keeps only the newest version of a package
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/gemel
WORKDIR /src
COPY . .
RUN /opt/gemel/bin/python -m pip install --no-cache-dir --require-hashes --requirement docker/requirements.txt \
    && /opt/gemel/bin/python -m pip install --no-cache-dir --no-deps --no-build-isolation . \
    && /opt/gemel/bin/python -m compileall -q /opt/gemel/lib/python3*/site-packages/gemel

FROM debian:bookworm-slim
LABEL org.opencontainers.image.title="gemel" \
      org.opencontainers.image.licenses="Apache-2.0 AND GPL-3.0-or-later"
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates python3 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --system --uid 10001 --user-group --no-create-home --home-dir /nonexistent gemel \
    && install -d -o gemel -g gemel /data
COPY --from=built /opt/gemel /opt/gemel
COPY LICENSE /usr/share/doc/gemel/LICENSE
COPY docker/healthy.py /opt/gemel/healthy.py
ENV PATH=/opt/gemel/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    XDG_CACHE_HOME=/data/cache
WORKDIR /data
VOLUME /data
USER 10001:10001
HEALTHCHECK --interval=30s --timeout=5s --start-period=120s CMD ["python3", "/opt/gemel/healthy.py"]
ENTRYPOINT ["gemel"]
CMD ["run", "/box/box.yaml"]
