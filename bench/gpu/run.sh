#!/usr/bin/env bash
# bench/gpu/run.sh 1|2|3: what `make gpu` runs, for a GPU that is lent for a quarter of an hour; each part ends
# within 180 s. Needs Python with torch, triton, pytest and pytest-benchmark; ncu and compute-sanitizer take part
# where they are installed. Rows, a log a job and the table go to $OUT, or to bench/results. DRY_RUN=1 only prints.
#
#   1  operations: 64 rows of each against float64, times beside their ceilings, hardware counters of the loss
#   2  what readers compare: whole training steps; eager, torch.compile and peers beside ours
#   3  tests on the GPU; memcheck and racecheck on small shapes
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
part=${1:?expected 1, 2 or 3}
python=${PYTHON:-python3}
out=${OUT:-bench/results}
export SMOPD_BENCH_OUTPUT=$out/rows.jsonl
PATH=$PATH:/usr/local/cuda/bin:$(ls -d /opt/nvidia/nsight-compute/* 2>/dev/null | tr '\n' ':')
if [ -d build/wheels ] && [ -z "${DRY_RUN:-}" ]; then # of make gpu-wheels
    site=$(mktemp -d)
    "$python" -m pip install -q --no-index --no-deps --no-compile --target "$site" build/wheels/*.whl || exit 1
    export PYTHONPATH=$site:${PYTHONPATH:-}
fi
[ -d build/triton ] && export TRITON_CACHE_DIR=$PWD/build/triton # of make gpu-wheels, too
ends=$((SECONDS + 180))
failed=0

# job NAME SECONDS COMMAND...: killed with its children at its limit, and at the part's end
job() {
    local name=$part-$1 limit=$2 left=$((ends - SECONDS)) status
    shift 2
    if [ -n "${DRY_RUN:-}" ]; then echo "$name, at most $limit s: $*"; return; fi
    if ! command -v "$1" >/dev/null; then echo "$name: $1 is not installed"; return; fi
    if [ "$left" -lt 1 ]; then echo "$name: not begun, the part's time was over"; failed=1; return; fi
    mkdir -p "$out"
    timeout -k 5 $((limit < left ? limit : left)) "$@" >"$out/$name.log" 2>&1
    status=$?
    echo "$name: exit status $status, $((ends - SECONDS)) s left" # 124: killed at its limit
    [ "$status" -eq 0 ] || failed=1
}
pytest=("$python" -m pytest -q -rs -p no:cacheprovider)
bench=("${pytest[@]}" bench)
small=(--smopd-check -k "triton and not linear and (smopd_loss and (V32000 or merge) or advantages)")
loss=smopd_loss-N8192-V151936-M2-kappa16-bf16-triton
metrics=gpu__time_duration.sum,dram__bytes_read.sum,dram__bytes_write.sum,lts__t_sector_hit_rate.pct
metrics+=,smsp__issue_active.avg.pct_of_peak_sustained_active

case $part in
1)
    job check 60 "${bench[@]}" --smopd-check -k triton
    job times 120 "${bench[@]}" --smopd-seconds 1 -k triton
    job counters 45 ncu --clock-control none --kernel-name "regex:(row|split)_kernel" --launch-count 1 \
        --metrics $metrics "${bench[@]}" --smopd-check -k $loss
    ;;
2)
    job step 150 "$python" -m bench.gpu.step --seconds 105 --output "$SMOPD_BENCH_OUTPUT"
    job readers 120 "${bench[@]}" --smopd-seconds 1 -k "not reference and not teacher"
    ;;
3)
    job tests 120 "${pytest[@]}" -v -m gpu -n 8 --dist loadgroup -p tests.gpu_plugin tests/kernels tests/engine
    job memcheck 45 compute-sanitizer --tool memcheck --error-exitcode 9 \
        env PYTORCH_NO_CUDA_MEMORY_CACHING=1 "${bench[@]}" "${small[@]}"
    job racecheck 45 compute-sanitizer --tool racecheck --error-exitcode 9 "${bench[@]}" "${small[@]}"
    ;;
*) echo "error: $part, expected 1, 2 or 3" >&2 && exit 2 ;;
esac
if [ -z "${DRY_RUN:-}" ] && [ -e "$out/rows.jsonl" ]; then "$python" -m bench "$out/rows.jsonl" >"$out/table.md"; fi
exit $failed
