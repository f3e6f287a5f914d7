"""The attack pool: a service leases waves of jobs and has workers attack them."""
