#!/usr/bin/env bash
# Builds the CPU image from a debootstrap root and asks it: read-only, as its own user. As root, on Debian.
#   deploy/test_image.sh MODEL.gguf [FOLDER]
# Needs buildah, debootstrap, curl and a Python whose version is the one of Debian's python3; what is in FOLDER is used again.
set -euo pipefail
model=$(realpath "$1")
python=${PYTHON:-python3}
folder=${2:-$(mktemp -d)}
root=$(cd "$(dirname "$0")/.." && pwd)
port=$((20000 + RANDOM % 20000))
export STORAGE_DRIVER=vfs BUILDAH_ISOLATION=chroot
storage=(--root "$folder/storage" --runroot "$folder/run" --storage-driver vfs)
mkdir -p "$folder/wheels"

say() { echo "image: $*"; }

if [ ! -x "$folder/base/usr/bin/python3" ]; then
    say "a Debian with Python, by debootstrap"
    debootstrap --variant=minbase --include=python3-minimal,python3-venv,ca-certificates bookworm "$folder/base" >/dev/null
    rm -rf "$folder"/base/var/cache/apt/* "$folder"/base/var/lib/apt/lists/* "$folder"/base/usr/share/{doc,man,locale}/*
fi
if ! compgen -G "$folder/wheels/kvarn-*.whl" >/dev/null; then
    say "wheels of Kvarn and of all that it needs"
    "$python" -m pip wheel -q --no-deps -w "$folder/wheels" "$root"
    "$python" -m pip wheel -q -w "$folder/wheels" "$(compgen -G "$folder/wheels/kvarn-*.whl")[redis]" \
        async-timeout  # which redis-py takes before Python 3.11.3
fi

say "the base image"
if ! buildah "${storage[@]}" inspect --type image localhost/debian-python >/dev/null 2>&1; then
    container=$(buildah "${storage[@]}" from scratch)
    buildah "${storage[@]}" add -q "$container" "$folder/base" / >/dev/null
    buildah "${storage[@]}" config --env PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$container"
    buildah "${storage[@]}" commit -q --rm "$container" localhost/debian-python >/dev/null
fi

say "the image"
began=$SECONDS
buildah "${storage[@]}" build -q --isolation chroot --layers=false -f "$root/deploy/Dockerfile" \
    --build-arg BUILD_BASE=localhost/debian-python --build-arg BASE=localhost/debian-python \
    --build-arg KVARN="/wheels/$(basename "$(compgen -G "$folder/wheels/kvarn-*.whl")")" \
    --build-arg PIP_ARGS="--no-index -f /wheels" --volume "$folder/wheels:/wheels:ro" \
    -t localhost/kvarn "$root" >/dev/null
say "built in $((SECONDS - began)) s"

container=$(buildah "${storage[@]}" from --pull-never localhost/kvarn)
mounted=$(buildah "${storage[@]}" mount "$container")
trap 'kill -9 "${server:-0}" 2>/dev/null || true; buildah "${storage[@]}" rm "$container" >/dev/null' EXIT
megabytes=$(du -sm --apparent-size "$mounted" | cut -f1)
say "size $megabytes MB"
[ "$megabytes" -lt 350 ] || { say "larger than 350 MB"; exit 1; }
user=$(buildah "${storage[@]}" inspect --type image --format '{{.OCIv1.Config.User}}' localhost/kvarn)
say "user $user"

# As a pod runs it: a root file system that cannot be written, its own /tmp and /models, and the image's user.
cat >"$folder/pod.sh" <<'POD'
set -e
mount --bind "$1" "$1" && mount -o remount,bind,ro "$1"
mount -t tmpfs tmpfs "$1/tmp" && mount -t tmpfs -o uid=10001,gid=10001 tmpfs "$1/models"
mount -t proc proc "$1/proc" && mount --rbind /dev "$1/dev"
cp "$2" "$1/models/model.gguf"
exec env -i PATH=/kvarn/bin:/usr/sbin:/usr/bin:/bin KVARN_HOME=/models HOME=/models PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 \
    chroot --userspec="$4" "$1" /kvarn/bin/kvarn serve --model /models/model.gguf --port "$3" --drain-delay 1
POD
unshare --mount --propagation private bash "$folder/pod.sh" "$mounted" "$model" "$port" "$user" >"$folder/server.log" 2>&1 &
server=$!
for _ in $(seq 120); do
    curl -sf "http://127.0.0.1:$port/health/ready" >/dev/null && break
    kill -0 $server || { cat "$folder/server.log"; exit 1; }
    sleep 1
done
grep -q "^Uid:[[:space:]]*${user%%:*}[[:space:]]" "/proc/$server/status" || { say "it does not run as $user"; exit 1; }
answer=$(curl -sf "http://127.0.0.1:$port/v1/chat/completions" -H 'content-type: application/json' \
    -d '{"model": "model.gguf", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}')
say "answer ${answer:0:160}"
kill -TERM $server
code=0
wait $server || code=$?
say "exit code $code"
[ "$code" = 0 ]
