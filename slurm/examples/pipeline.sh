#!/bin/bash
# Pack data, train, evaluate and export: four jobs, each started once the previous one has succeeded.
#   slurm/examples/pipeline.sh FOLDER_OF_RUN_FILES
set -euo pipefail
folder=${1:?usage: $0 folder with pack.yaml train.yaml evaluate.yaml export.yaml}
after=()
for step in pack train evaluate export; do
    job=$(hpctrain submit --parsable "${after[@]}" "$folder/$step.yaml")
    echo "$step: job $job"
    after=(--after "$job")
done
