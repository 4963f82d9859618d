from palm_jax import cli

cli.main()
