"""The attack service: it leases waves of jobs and has workers attack them."""
