# Stages for expert parallelism, read by run.sh: ep-shared needs one GPU, which two ranks share; ep2 needs two. It is ep2-speed and ep2-shape
# (the real shape's graphs), with the GPUs to themselves, and then the lanes of ep2-gates beside one another (the demo model's graphs and bits,
# serving, failures, starts and stops): two minutes and seven.
# usage: run.sh ep-shared | run.sh ep2 | run.sh ep2-core (ep2-bits, ep2-shape, ep2-speed = ep2-one-gpu and ep2-two-gpus) | run.sh ep2-gates[=LANE,…]
# lanes: bits soak reliability failures-p2p failures-nccl surroundings cycles.
# EP_CYCLES: starts and stops (default 100; after every fifth a start that is killed); EP_LANES: side by side (4); EP_SEED: of the kills.
# EP_SOAK: seconds of the soak (360).
# EP_FLAGS and EP_TRANSPORTS replace the flags of a server and its two transports, to try this script without a GPU:
#   EP_FLAGS='--device cpu --ep 2 --kv-memory 256MiB' EP_TRANSPORTS='host-staged host-staged' EP_CYCLES=6 tests/gpu/run.sh ep2-gates=cycles

# Models with experts that the repository carries with their weights.
sparse='shakespeare-dsv2 tiny-dsv2-grouped'
ep_shared_flags=(--device cuda --ep 2 --devices 0,0 --allow-shared-device)
ep2_flags=(--device cuda --ep 2 --devices 0,1)
# Of servers that stand beside others.
read -ra ep2_serving <<< "tests/models/shakespeare-dsv2 ${EP_FLAGS:-${ep2_flags[*]} --kv-memory 2GiB}"
read -ra ep2_transports <<< "${EP_TRANSPORTS:-p2p nccl}"

# verdict NAME OK REASON SECONDS: a line of the table for what no probe judges.
verdict() {
  number=$((number + 1))
  note "$([ "$2" = 1 ] && echo pass || echo FAIL)" "$4" "$1  $3"
}

# serve_behind NAME FLAGS…: a server in the background; its process is $pid, is noted, and speaks to $out/NAME.log.
serve_behind() {
  local name=$1
  shift
  : > "$out/$name.log"
  "$probe" serve --port 0 --served-model-name m "$@" > "$out/$name.log" 2>&1 &
  pid=$!
  echo $pid >> "$scratch/pids"
}

# Once the server of $pid is ready, its $address; fails when it leaves, or is not ready within two minutes.
await_ready() {
  local began=$SECONDS
  until address=$(grep -ao 'http://[0-9.]*:[0-9]*' "$1" | head -n 1) && [ -n "$address" ] && curl -sf -m 2 "$address/health" > /dev/null; do
    kill -0 "$pid" 2> /dev/null && [ $((SECONDS - began)) -lt 120 ] || return 1
    sleep 0.1
  done
}

# serve_until_exit NAME LIMIT FLAGS…: starts a server; once it is ready sends one request; waits for its exit, at most LIMIT seconds.
# Sets code (124: it had to be killed), took (seconds from the request, or from the start when it never was ready), log and asked (1: a
# server that was ready took the request's connection).
serve_until_exit() {
  local name=$1 limit=$2 pid asking='' began=$SECONDS address=''
  shift 2
  asked=0
  log=$out/$name.log
  serve_behind "$name" "$@"
  while kill -0 $pid 2> /dev/null && [ $((SECONDS - began)) -lt "$limit" ]; do
    if [ -z "$asking" ]; then
      address=$(grep -ao 'http://[0-9.]*:[0-9]*' "$log" | head -n 1)
      if [ -n "$address" ] && curl -sf -m 2 "$address/health" > /dev/null; then
        began=$SECONDS
        curl -s -m "$limit" "$address/v1/completions" -H 'Content-Type: application/json' \
          -d '{"model": "m", "prompt": "ROMEO.", "max_tokens": 64, "ignore_eos": true}' > "$out/$name.answer" 2>&1 &
        asking=$!
      fi
    fi
    sleep 0.2
  done
  took=$((SECONDS - began)) code=124
  if kill -0 $pid 2> /dev/null; then kill -9 $pid; wait $pid 2> /dev/null; else wait $pid; code=$?; fi
  [ -n "$asking" ] || return 0
  wait "$asking" 2> /dev/null
  # 7: curl found nobody to connect to.
  [ $? = 7 ] || asked=1
}

# fails NAME LIMIT PATTERN FLAGS…: a server that was ready and was asked must leave by itself with a code that is not 0, in time, and say
# PATTERN. never_starts: one that must leave like that before it is ready.
fails() { leaves 1 "$@"; }
never_starts() { leaves 0 "$@"; }

leaves() {
  local wanted=$1 name=$2 limit=$3 pattern=$4 code took log asked said ok=0
  shift 4
  serve_until_exit "$name" "$limit" "$@"
  said=$(grep -aE "$pattern" "$log" | head -n 1 | cut -c1-240)
  [ $code -ne 0 ] && [ $code -ne 124 ] && [ -n "$said" ] && [ $asked = "$wanted" ] && ok=1
  [ -n "$said" ] || said="never said /$pattern/: $(tail -n 1 "$log" | cut -c1-240)"
  [ $asked = "$wanted" ] || said="$([ $asked = 1 ] && echo 'was ready and asked' || echo 'was never asked'); $said"
  verdict "$name" $ok "exit $code; $said" "$took"
}

# stops NAME SIGNAL FLAGS…: one start, one answered request, one signal; the exit must be in order and within ten seconds.
stops() {
  local name=$1 signal=$2 pid began address='' code=0 left said=1
  shift 2
  serve_behind "$name" "$@"
  await_ready "$out/$name.log" || said=0
  if [ $said = 1 ]; then
    curl -sf -m 20 "$address/v1/completions" -H 'Content-Type: application/json' -d '{"model": "m", "prompt": "ROMEO.", "max_tokens": 8}' \
      > "$out/$name.answer" || said=0
  fi
  began=$SECONDS
  kill "-$signal" $pid 2> /dev/null
  while kill -0 $pid 2> /dev/null && [ $((SECONDS - began)) -lt 15 ]; do sleep 0.05; done
  took=$((SECONDS - began))
  if kill -0 $pid 2> /dev/null; then kill -9 $pid; code=124; fi
  wait $pid 2> /dev/null
  left=$?
  [ $code = 124 ] || code=$left
  [ $said = 1 ] && [ $code = 0 ] && [ $took -le 10 ]
}

# killed NAME WHEN FLAGS…: one start and a kill -9, up to three seconds after the start or (WHEN is answering) up to one after it began to
# answer. Up to then it must have been alive; gone it is at once, and `ep2_left_behind` looks for what it left.
killed() {
  local name=$1 when=$2 pid address='' code=0 millis=$((RANDOM % 3000)) busy=''
  shift 2
  serve_behind "$name" "$@"
  if [ "$when" = answering ]; then
    await_ready "$out/$name.log" || { kill -9 $pid 2> /dev/null; wait $pid 2> /dev/null; return 1; }
    curl -s -m 60 "$address/v1/completions" -H 'Content-Type: application/json' \
      -d '{"model": "m", "prompt": "ROMEO.", "max_tokens": 1500, "ignore_eos": true, "stream": true}' > "$out/$name.answer" 2>&1 &
    busy=$!
    millis=$((millis / 3))
  fi
  sleep "$(printf '%d.%03d' $((millis / 1000)) $((millis % 1000)))"
  kill -9 $pid 2> /dev/null
  wait $pid 2> /dev/null || code=$?
  # An answer that was whole before the kill says nothing.
  [ -z "$busy" ] || ! wait "$busy" 2> /dev/null || return 1
  [ $code = 137 ]
}

# ep_failures NAME TRANSPORT FLAGS…: what a rank that fails, hangs or never starts must come to. NAME has an @ for which.
ep_failures() {
  local name=$1 transport=$2
  shift 2
  fails "${name/@/rank-panics}" 30 'rank 1 failed in phase step: panic' "$@" --transport "$transport" --fault rank-panic@1
  fails "${name/@/rank-stalls}" 45 'rank 0 waited|did not finish' "$@" --transport "$transport" --fault rank-stall@1
  never_starts "${name/@/start-stalls}" 60 'rank 1 is in' "$@" --transport "$transport" --init-timeout 15 --fault start-stall@1
}

ep_shared() {
  local model transport
  local small=(--kv-memory 1GiB --max-slots 32 --prefill-chunk 512)
  for model in $sparse; do
    run "ep-readiness-p2p-shared-$model" graph-readiness "tests/models/$model" "${ep_shared_flags[@]}" "${small[@]}" --transport p2p --no-canary
  done
  for model in $sparse; do
    start "ep-exactness-shared-$model" exactness "tests/models/$model" --device cuda "${small[@]}" --allow-shared-device \
      --ep-legs 2 --ep-devices 0,0 --transport-legs host-staged,p2p \
      --leg 'ep 2, host-staged, eager' --leg 'ep 2, p2p, eager' --leg 'ep 2, p2p, graph'
  done
  finish
  run ep-attribution-shared attribution "${ep_shared_flags[@]}" "${small[@]}" --transport p2p --rows 1 --steps 16
  local serving=(tests/models/shakespeare-dsv2 "${ep_shared_flags[@]}" "${small[@]}")
  for transport in p2p host-staged; do
    stops_in_order "ep-shared-stops-$transport" TERM "${serving[@]}" --transport $transport
    ep_failures "ep-shared-@-$transport" $transport "${serving[@]}"
  done
  never_starts ep-shared-capture 60 'bucket 4' "${serving[@]}" --transport p2p --fault capture-fail@4
  never_starts ep-shared-nccl 20 'NCCL' "${serving[@]}" --transport nccl
}

# One start and stop; in order, or the last line of what it said.
stops_in_order() {
  if stops "$@"; then verdict "$1" 1 'answered and left in order' "$took"; else verdict "$1" 0 "took $took s; $(tail -n 1 "$out/$1.log" | cut -c1-240)" "$took"; fi
}

ep2() {
  ep2_speed
  ep2_shape
  ep2_gates
}

ep2_core() {
  ep2_bits
  ep2_shape
  ep2_speed
}

ep2_gates() { ep2_lanes bits soak reliability failures-p2p failures-nccl surroundings cycles; }

lite=(tests/shapes/deepseek-v2-lite --load-format dummy --max-model-len 4096)

ep2_bits() {
  local model transport
  local legs=(--leg 'ep 2, host-staged, eager')
  for transport in nccl p2p; do legs+=(--leg "ep 2, $transport, eager" --leg "ep 2, $transport, graph"); done
  run ep2-smoke graph-readiness tests/models/shakespeare-dsv2 "${ep2_flags[@]}" --kv-memory 1GiB --transport nccl --nccl-smoke only
  for model in $sparse; do
    run "ep2-exactness-$model" exactness "tests/models/$model" --device cuda --kv-memory 1GiB --ep-legs 2 --ep-devices 0,1 \
      --transport-legs host-staged,nccl,p2p "${legs[@]}"
  done
  for transport in nccl p2p; do
    run "ep2-readiness-$transport-shakespeare-dsv2" graph-readiness tests/models/shakespeare-dsv2 "${ep2_flags[@]}" --kv-memory 2GiB --transport $transport \
      --steps 40 --replays 200 --no-canary
  done
}

ep2_shape() {
  local transport
  for transport in nccl p2p; do
    run "ep2-readiness-$transport-deepseek-v2-lite" graph-readiness "${lite[@]}" "${ep2_flags[@]}" --kv-memory 4GiB --transport $transport \
      --steps 16 --replays 100 --no-canary
  done
}

ep2_speed() {
  ep2_one_gpu
  ep2_two_gpus
}

ep2_one_gpu() {
  run ep2-bench-one-gpu bench-decode "${lite[@]}" --device cuda --rows 1,8,32,64,128 --context 64 --warmup 32 --steps 256 --repeats 2
}

ep2_two_gpus() {
  local transport
  for transport in p2p nccl; do
    run "ep2-bench-$transport" bench-decode "${lite[@]}" "${ep2_flags[@]}" --transport $transport --rows 1,8,32,64,128 \
      --context 64 --warmup 32 --steps 256 --repeats 2
    run "ep2-attribution-$transport-b1" attribution "${lite[@]}" "${ep2_flags[@]}" --transport $transport --rows 1
    run "ep2-attribution-$transport-b32" attribution "${lite[@]}" "${ep2_flags[@]}" --transport $transport --rows 32
  done
}

# What one lane does, one after the other. Processes take turns of some milliseconds on a GPU, and ranks that wait for each other on two of
# them meet every other turn: a step of eight processes takes tens of milliseconds, a thousandth of the time that a rank waits for another.
# So nothing here is judged by its speed, and limits of time have room.
ep2_lane() {
  local transport
  case $1 in
    bits) LIMIT=${SOAK_LIMIT:-480} ep2_bits ;;
    soak)
      LIMIT=${SOAK_LIMIT:-480} run ep2-soak soak --duration "${EP_SOAK:-360}" --bucket 20 --settle 60 --canary 16 --leak-every 10 --timeout 120 \
        -- "${ep2_serving[@]}" --transport "${ep2_transports[0]}"
      ;;
    reliability)
      LIMIT=${SOAK_LIMIT:-480} run ep2-reliability http-reliability --timeout 120 --collapse-ms 1000 -- "${ep2_serving[@]}" --transport "${ep2_transports[0]}"
      ;;
    failures-p2p) ep_failures ep2-@-p2p "${ep2_transports[0]}" "${ep2_serving[@]}" ;;
    failures-nccl) ep_failures ep2-@-nccl "${ep2_transports[1]}" "${ep2_serving[@]}" ;;
    surroundings)
      # What around the process goes wrong is named; what only slows NCCL down is survived.
      NCCL_SOCKET_IFNAME=doesnotexist never_starts ep2-nccl-interface 60 'NCCL_SOCKET_IFNAME=doesnotexist' "${ep2_serving[@]}" --transport nccl
      NCCL_P2P_DISABLE=1 stops_in_order ep2-nccl-without-p2p TERM "${ep2_serving[@]}" --transport nccl
      CUDA_VISIBLE_DEVICES=0 never_starts ep2-one-visible 15 'CUDA_VISIBLE_DEVICES' "${ep2_serving[@]}" --transport nccl
      CUDA_VISIBLE_DEVICES=1,0 stops_in_order ep2-reordered TERM "${ep2_serving[@]}" --transport p2p
      never_starts ep2-three 15 '1, 2, 4 or 8' tests/models/shakespeare-dsv2 --device cuda --ep 3
      ;;
  esac
}

# Cycle numbers FROM, FROM + STEP, …: a start and stop each, after every fifth a start and kill -9. A line of $scratch/cycles for each.
ep2_cycles() {
  local from=$1 step=$2 cycle name=ep2-cycle-$1
  RANDOM=$((${EP_SEED:-1} + from))
  for ((cycle = from; cycle <= ${EP_CYCLES:-100}; cycle += step)); do
    [ "$(limit)" -gt 15 ] || break
    cycle_of "$cycle" stops TERM "$((cycle % 2))"
    ((cycle % 5)) || cycle_of "$cycle" killed "$( ((cycle / 5 % 2)) && echo starting || echo answering)" "$((cycle / 10 % 2))"
  done
}

# cycle_of NUMBER stops|killed HOW TRANSPORT
cycle_of() {
  if "$2" "$name" "$3" "${ep2_serving[@]}" --max-slots 8 --transport "${ep2_transports[$4]}"; then
    echo "ok $1 $2" >> "$scratch/cycles"
  else
    echo "bad $1 $2 $3 ${ep2_transports[$4]}: $(tail -n 1 "$out/$name.log" | cut -c1-160)" >> "$scratch/cycles"
    cp "$out/$name.log" "$out/ep2-cycle-bad-$1.log"
  fi
}

# Runs the lanes named, those that the stage asks for, side by side.
ep2_lanes() {
  local lane at=$number cycles='' from shm began=$SECONDS
  for lane in ${only//,/ }; do
    case " $* " in *" $lane "*) ;; *) echo "no lane $lane in: $*" >&2; exit 2 ;; esac
  done
  : > "$scratch/pids"
  : > "$scratch/cycles"
  shm=$(ls /dev/shm 2> /dev/null)
  for lane in "$@"; do
    case ,${only:-$lane}, in *,"$lane",*) ;; *) continue ;; esac
    at=$((at + 100))
    if [ "$lane" = cycles ]; then
      cycles=$(seq "${EP_LANES:-4}")
      for from in $cycles; do ep2_cycles "$from" "${EP_LANES:-4}" & done
    else
      (number=$at jobs=1 && ep2_lane "$lane") &
    fi
  done
  wait
  number=$((at + 100))
  [ -z "$cycles" ] || ep2_cycles_verdict $((SECONDS - began))
  ep2_left_behind "$shm"
}

ep2_cycles_verdict() {
  local cycles=${EP_CYCLES:-100} bad well
  well=$(grep -c '^ok' "$scratch/cycles")
  bad=$(grep '^bad' "$scratch/cycles" | head -n 5)
  verdict ep2-cycles "$([ "$cycles" -ge 5 ] && [ "$well" = $((cycles + cycles / 5)) ] && echo 1 || echo 0)" \
    "$(grep -c '^ok.*stops' "$scratch/cycles") of $cycles starts and stops, $(grep -c '^ok.*killed' "$scratch/cycles") of $((cycles / 5)) kills${bad:+; $bad}" "$1"
}

# Of the servers that were started here none may live, or be on a GPU; shared memory must be as before. A GPU may need a moment to let go.
ep2_left_behind() {
  local left began=$SECONDS count
  while left=$(survivors "$1") && [ -n "$left" ] && [ $((SECONDS - began)) -lt 10 ]; do sleep 0.5; done
  count=$(wc -l < "$scratch/pids")
  [ "$count" -gt 0 ] || return 0
  verdict ep2-left-behind "$([ -z "$left" ] && echo 1 || echo 0)" "$(tr '\n' ' ' <<< "${left:-nothing}")of $count servers" $((SECONDS - began))
}

# A word for each process of $scratch/pids that lives or is on a GPU, and for each entry of shared memory that is not in $1.
survivors() {
  local pid on_gpus
  on_gpus=$(nvidia-smi --query-compute-apps=pid --format=csv,noheader 2> /dev/null) || [ -n "${EP_FLAGS:-}" ] || echo 'nvidia-smi does not answer'
  while read -r pid; do
    # The number may be another process's by now.
    if tr '\0' ' ' 2> /dev/null < "/proc/$pid/cmdline" | grep -q 'serve --port 0'; then echo "process $pid"; fi
    if grep -qx "$pid" <<< "$on_gpus"; then echo "process $pid on a GPU"; fi
  done < "$scratch/pids" 2> /dev/null
  comm -13 <(sort <<< "$1") <(ls /dev/shm 2> /dev/null | sort) | sed 's|^|/dev/shm/|'
}
