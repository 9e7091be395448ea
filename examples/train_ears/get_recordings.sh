#!/usr/bin/env bash
# Downloads and unpacks real recordings for evaluation: get_recordings.sh FOLDER. Needs apt-get and dpkg.
set -euo pipefail
mkdir -p "$1" && cd "$1"
apt-get download asterisk-core-sounds-en asterisk-core-sounds-en-g722 pocketsphinx-testdata
for package in *.deb; do
  dpkg -x "$package" .
  rm "$package"
done
