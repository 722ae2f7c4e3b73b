"""Static pages without a server and a network: schedules, plans, published runs, lectures, the course."""
