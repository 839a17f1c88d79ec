# Gemel on a Jetson with JetPack 7. Written, never built and never run: there was no Jetson to build it on.
#     docker build -f docker/jetson.Dockerfile -t gemel .
# What the image ships under, and how it is run: docs/running-a-box.md.
FROM nvcr.io/nvidia/pytorch:25.11-py3

LABEL org.opencontainers.image.title="gemel" \
      org.opencontainers.image.licenses="Apache-2.0 AND GPL-3.0-or-later"
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
WORKDIR /src
COPY . .
# torch and torchvision are those of the base image, made for this GPU; it holds versions of others that are not ours.
RUN python3 -m venv --system-site-packages /opt/gemel \
    && export PIP_CONSTRAINT='' \
    && /opt/gemel/bin/python -m pip install --no-cache-dir --require-hashes --requirement docker/requirements.txt \
    && /opt/gemel/bin/python -m pip install --no-cache-dir --no-deps --no-build-isolation . \
    && rm -rf /src \
    && useradd --system --uid 10001 --user-group --no-create-home --home-dir /nonexistent --groups video gemel \
    && install -d -o gemel -g gemel /data
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
