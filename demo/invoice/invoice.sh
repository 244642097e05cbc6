#!/bin/sh
# Prints the total of an invoice in cents.
# usage: invoice.sh FILE [DISCOUNT_PERCENT]
# FILE holds one item per line: quantity, unit price in cents, description.
set -eu

file=$1
discount=${2:-0}

total=0
while read -r quantity price description; do
    case $quantity in ''|'#'*) continue ;; esac
    total=$((total + price))
done < "$file"

echo $((total - total * discount / 100))
