#!/bin/sh
# Builds the root file system of a box without a daemon, as x86.Dockerfile does with one:
#     docker/root.sh x86_64|aarch64 FOLDER          (make image)
# Needs root, debootstrap, and uv in .venv. For another processor packages are unpacked, not configured.
set -eu
arch=$1 root=$2
packages=$root/usr/local/lib/python3.11/dist-packages
uv=${UV:-.venv/bin/uv}
debootstrap=${DEBOOTSTRAP:-debootstrap}
mirror=${MIRROR:-http://deb.debian.org/debian}
keys=/usr/share/keyrings/debian-archive-keyring.gpg
needed=python3,ca-certificates

[ ! -e "$root" ] || { echo "$root: is there already: name a new folder" >&2; exit 2; }
case $arch in
x86_64) debian=amd64 ;;
aarch64) debian=arm64 ;;
*) echo "$arch: is no processor that images are built for: name x86_64 or aarch64" >&2; exit 2 ;;
esac
if [ "$arch" = "$(uname -m)" ]; then
    $debootstrap --variant=minbase --include=$needed --keyring=$keys bookworm "$root" "$mirror"
else
    $debootstrap --arch=$debian --foreign --variant=minbase --include=$needed --keyring=$keys bookworm "$root" "$mirror"
    for file in "$root"/var/cache/apt/archives/*.deb; do dpkg-deb -x "$file" "$root"; done
    printf 'root:x:0:0::/root:/bin/sh\n' > "$root/etc/passwd"
    rm -rf "$root/debootstrap"
fi
rm -rf "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/* "$root"/usr/share/doc/* "$root"/usr/share/man/* "$root"/usr/share/locale/*

wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT
"$uv" build --quiet --wheel --out-dir "$wheels" .
# A processor's own packages are in pyproject.toml; versions and hashes of the lock hold for all.
"$uv" pip compile --quiet pyproject.toml --python-platform "$arch-manylinux_2_28" --python-version 3.11 --generate-hashes \
    --constraint docker/requirements.txt --output-file "$wheels/needed.txt" > /dev/null
"$uv" pip install --quiet --target "$packages" --python-platform "$arch-manylinux_2_28" --python-version 3.11 \
    --only-binary :all: --no-deps --require-hashes --requirement "$wheels/needed.txt"
"$uv" pip install --quiet --target "$packages" --python-version 3.11 --no-deps "$wheels"/gemel-*.whl
# What a box never opens: tests of ONNX, ONNX Runtime's tools for training and quantising.
rm -rf "$packages/onnx/backend/test/data" "$packages"/onnxruntime/transformers "$packages"/onnxruntime/quantization "$packages/bin"
"${PYTHON:-python3.11}" -m compileall -q "$packages"
mkdir -p "$root/data" "$root/usr/local/bin"
printf '#!/usr/bin/python3\nimport sys\nfrom gemel.cli import main\nsys.exit(main())\n' > "$root/usr/local/bin/gemel"
chmod 755 "$root/usr/local/bin/gemel"
cp docker/healthy.py "$root/usr/local/bin/healthy.py"
du -sm "$root"
