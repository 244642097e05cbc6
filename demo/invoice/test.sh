#!/bin/sh
# Runs every check; exit status 0 means that all of them passed.
cd "$(dirname "$0")" || exit 1
failed=0

check() { # NAME EXPECTED ACTUAL
    if [ "$2" = "$3" ]; then
        echo "ok $1"
    else
        echo "FAILED $1: expected $2, got $3"
        failed=1
    fi
}

check "one of each" 2500 "$(sh invoice.sh items/single.txt)"
check "several of one item" 7300 "$(sh invoice.sh items/several.txt)"
check "a discount" 6570 "$(sh invoice.sh items/several.txt 10)"

if [ "$failed" -eq 0 ]; then echo "all checks passed"; fi
exit $failed
