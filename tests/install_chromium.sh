#!/usr/bin/env bash
# The browser of the viewer's tests: Debian's Chromium. Where it cannot be installed, says why and fails.
set -euo pipefail

for name in chromium chromium-browser google-chrome; do
	command -v "$name" > /dev/null && exit 0
done

without() {
	echo "no Chromium for the browser tests: $1" >&2
	exit 1
}

command -v apt-get > /dev/null || without "there is no apt-get here; install Chromium by hand"
as_root=()
if [ "$(id -u)" != 0 ]; then
	sudo -n true 2> /dev/null || without "installing needs root; run: sudo apt-get install chromium"
	as_root=(sudo)
fi
echo "installing Debian's chromium (once)"
export DEBIAN_FRONTEND=noninteractive
"${as_root[@]}" apt-get update -qq || without "apt-get update failed"
"${as_root[@]}" apt-get install -qq -y --no-install-recommends chromium fonts-dejavu-core > /dev/null ||
	without "apt-get install chromium failed"
